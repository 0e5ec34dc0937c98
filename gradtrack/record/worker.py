"""The thread that brings rows to one backend, however slow or broken its tracker is."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gradtrack.backends.base import Backend
from gradtrack.errors import PermanentBackendError
from gradtrack.record.faults import Faults
from gradtrack.record.feed import Feed, Row
from gradtrack.record.offsets import Offsets
from gradtrack.records import Record, RunInfo

BATCH_ROWS: Final = 256
_FIRST_DELAY_SECONDS: Final = 0.25
_LONGEST_DELAY_SECONDS: Final = 30.0
_CLOSING_DELAY_SECONDS: Final = 0.5
_IDLE_SECONDS: Final = 1.0
_HOPELESS: Final = 8


@dataclass(slots=True)
class _Flush:
    target: int
    done: threading.Event


class Worker:
    """Writes the rows of a feed to a backend in order and in batches, again and again until they are taken.

    It is a daemon thread: a `write` that never returns keeps neither `close` nor the interpreter waiting. Rows that a
    backend refuses for good are left to the journal.
    """

    def __init__(self, name: str, backend: Backend, feed: Feed, run: RunInfo, offsets: Offsets) -> None:
        self.name, self.feed = name, feed
        self.acknowledged = 0
        self.refused: list[int] = []
        self.faults = Faults(name)
        self._backend, self._run, self._offsets = backend, run, offsets
        self._introduced = False
        self._refused_in_a_row = 0
        self._flushes: list[_Flush] = []
        self._hurry = threading.Event()
        self._failed = False
        self._end: float | None = None
        self._thread = threading.Thread(target=self._work, name=f"gradtrack-{name}", daemon=True)

    @property
    def pending(self) -> int:
        """Count the rows that are neither taken, nor refused, nor lost."""
        return max(self.feed.accepted - self.acknowledged - len(self.refused) - self.feed.lost, 0)

    @property
    def address(self) -> Mapping[str, Any]:
        """Return where the backend writes to, as far as it can tell."""
        with contextlib.suppress(Exception):
            return self._backend.address()
        return {}

    def start(self) -> None:
        """Begin to deliver."""
        try:
            self._thread.start()
        except RuntimeError as fault:  # no thread can start while the interpreter exits
            self.faults.note(fault, "the journal keeps its rows")

    def ask_flush(self) -> threading.Event:
        """Flush the backend once everything that was offered so far is delivered."""
        flush = _Flush(self.feed.accepted, threading.Event())
        self._flushes.append(flush)
        self._hurry.set()
        self.feed.wake()
        return flush.done

    def ask_close(self, *, failed: bool, end: float) -> None:
        """Deliver what is left, begin no write after `end` (of the monotonic clock), and let the backend go."""
        self._failed, self._end = failed, end
        self._hurry.set()
        self.feed.wake()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread, and say whether it ended."""
        if self._thread.ident is None:
            return False
        self._thread.join(max(timeout_seconds, 0.0))
        return not self._thread.is_alive()

    def _work(self) -> None:
        while not self._out_of_time():
            rows = self.feed.take(BATCH_ROWS, _IDLE_SECONDS)
            if rows:
                self._deliver(rows)
            self._flush_due()
            if self._end is not None and self.feed.position >= self.feed.accepted:
                break
        self._close()

    def _deliver(self, rows: list[Row], *, again: bool = False) -> None:
        delay = _FIRST_DELAY_SECONDS
        while not self._out_of_time():
            try:
                self._write(rows, again=again)
            except PermanentBackendError as fault:
                self._refuse(rows, fault)
                return
            except BaseException as fault:  # also a tracker that exits: it must not end this thread in silence
                self.faults.note(fault, "the journal keeps the rows until it is back")
            else:
                self._refused_in_a_row = 0
                self.acknowledged += len(rows)
                self._note_offset(rows[-1][0] + 1)
                return
            again = True
            self._pause(delay)
            delay = min(2 * delay, _LONGEST_DELAY_SECONDS)

    def _write(self, rows: list[Row], *, again: bool) -> None:
        """Write the rows; those that come again only where the destination does not have them yet."""
        records = [record for _, record in rows]
        if again:
            records = missing(self._backend, records)
        if not records:
            return
        if not self._introduced:
            records[0] = dataclasses.replace(records[0], run=self._run)
        self._backend.write(records)
        self._introduced = True

    def _refuse(self, rows: list[Row], fault: PermanentBackendError) -> None:
        """Find the rows that the backend refuses; after several in a row believe it that it refuses all."""
        if len(rows) > 1 and self._refused_in_a_row < _HOPELESS:
            middle = len(rows) // 2
            self._deliver(rows[:middle], again=True)
            self._deliver(rows[middle:], again=True)
            return
        self._refused_in_a_row += len(rows)
        self.refused.extend(number for number, _ in rows)
        self.faults.note(fault, f"it refuses rows for good, the first at step {rows[0][1].step}; the journal has them")
        self._note_offset(rows[-1][0] + 1)

    def _note_offset(self, following: int) -> None:
        self._offsets.set(self.name, following, self.refused, self.address)

    def _pause(self, delay_seconds: float) -> None:
        """Wait before the next attempt, less long while somebody waits for this thread."""
        if self._end is not None:
            remaining = self._end - time.monotonic()
            time.sleep(max(min(delay_seconds, _CLOSING_DELAY_SECONDS, remaining), 0.0))
            return
        self._hurry.wait(delay_seconds)
        self._hurry.clear()

    def _out_of_time(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def _flush_due(self) -> None:
        due = [flush for flush in self._flushes if flush.target <= self.feed.position]
        if not due:
            return
        self._attempt(self._backend.flush, "what it holds may not be durable")
        for flush in due:
            self._flushes.remove(flush)
            flush.done.set()

    def _close(self) -> None:
        self._attempt(lambda: self._backend.close(failed=self._failed), "its run may look unfinished")
        self._offsets.save()

    def _attempt(self, action: Any, consequence: str) -> None:
        try:
            action()
        except BaseException as fault:
            self.faults.note(fault, consequence)


def missing(backend: Backend, records: list[Record]) -> list[Record]:
    """Leave out what the destination already has; a failure to tell leaves everything in."""
    left: list[Record] = []
    for part in distinct(records):
        found = backend.present(part)
        left.extend(part if found is None else [one for one in part if (one.source, one.step) not in found])
    return left


def distinct(records: list[Record]) -> list[list[Record]]:
    """Split records, in order, so that within a part no two share source and step."""
    parts: list[list[Record]] = []
    keys: set[tuple[str, int]] = set()
    for record in records:
        key = (record.source, record.step)
        if not parts or key in keys:
            parts.append([])
            keys.clear()
        keys.add(key)
        parts[-1].append(record)
    return parts
