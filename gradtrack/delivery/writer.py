"""The rows on their way to one backend: a bounded queue, and writing each exactly once."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from gradtrack.backends.base import Backend, RunParts
from gradtrack.delivery.journal.writing import Journal
from gradtrack.errors import PermanentBackendError
from gradtrack.records import Record, RunInfo

Row = tuple[int, Record]
QUEUE_ROWS: Final = 4096


class Feed:
    """Takes rows in from the training thread without ever blocking it, and gives them out in order to one worker.

    Rows that find the queue full are read from the journal later. Only a row that is in neither is lost, and counted.
    """

    def __init__(self, journal: Journal | None, *, limit: int = QUEUE_ROWS) -> None:
        self.accepted = self.lost = 0
        self._journal, self._limit = journal, limit
        self._queue: deque[Row] = deque()
        # An interrupt from the keyboard may leave a condition locked as it is entered, but no plain lock.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waits = False
        """Whether the worker waits for rows, and so is to be told of one."""
        self.position = 0
        """The number of the row that comes next."""
        self._known_lost: set[int] = set()
        self._unkept: deque[int] = deque()
        """The rows on their way, here or in the worker, that the journal lacks."""
        self._reading: Iterator[Row] | None = None

    @property
    def lagging(self) -> bool:
        """Say whether rows wait in the journal because the queue could not hold them."""
        return self.accepted - self.position > len(self._queue)

    @property
    def unkept(self) -> int:
        """Count the rows that only the memory holds: they are lost unless the backend takes them."""
        return len(self._unkept)

    def settle(self, number: int) -> None:
        """Forget the rows up to this one, which the backend has taken or refused."""
        with self._lock:
            while self._unkept and self._unkept[0] <= number:
                self._unkept.popleft()

    def offer(self, number: int, record: Record, *, kept: bool) -> None:
        """Take a row in, unless it came before; `kept` says that the journal has it."""
        with self._lock:
            if number < self.accepted:
                return
            self.accepted = number + 1
            if len(self._queue) < self._limit:
                self._queue.append((number, record))
                if not kept:
                    self._unkept.append(number)
            elif not kept:
                self._known_lost.add(number)
                self.lost += 1
            if self._waits:
                self._changed.notify()

    def take(self, limit: int, timeout_seconds: float) -> list[Row]:
        """Give the next rows out, or none when the time is over or `wake` was called."""
        with self._lock:
            if self.position >= self.accepted:
                self._waits = True
                self._changed.wait(timeout_seconds)
                self._waits = False
            stop = self._queue[0][0] if self._queue else self.accepted
            if stop == self.position:
                rows: list[Row] = []
                while self._queue and len(rows) < limit and self._queue[0][0] == self.position:
                    rows.append(self._queue.popleft())
                    self.position += 1
                return rows
        return self._reread(stop, limit)

    def reach(self, count: int) -> None:
        """Know of so many rows: one that was interrupted on its way here is in the journal, or lost."""
        with self._lock:
            self.accepted = max(self.accepted, count)

    def wake(self) -> None:
        """Let a waiting `take` return."""
        with self._lock:
            self._changed.notify()

    def _reread(self, stop: int, limit: int) -> list[Row]:
        """Read what is missing before `stop` from the journal, and count what is not there either."""
        rows: list[Row] = []
        reading = self._reading or (iter(()) if self._journal is None else self._journal.reread(self.position))
        reached = stop
        for number, record in reading:
            if number >= stop:
                break
            rows.append((number, record))
            if len(rows) == limit:
                reached = number + 1
                break
        self._reading = reading if reached < stop else None
        missing = set(range(self.position, reached)) - {number for number, _ in rows} - self._known_lost
        with self._lock:
            self.lost += len(missing)
            self._known_lost = {number for number in self._known_lost if number >= reached}
            self.position = reached
        return rows


_HOPELESS: Final = 8


class Writer:
    """Writes rows to a backend, the run with the first of them, and finds out those that it refuses for good.

    `write` passes on any other exception; call it again with the same rows, and only those that the destination does
    not have are written again.
    """

    def __init__(
        self,
        backend: Backend,
        run: RunInfo,
        *,
        on_refusal: Callable[[PermanentBackendError, Record], object] = lambda *_: None,
    ) -> None:
        self.backend = backend
        self.taken = self.present = 0
        self.refused: list[int] = []
        self.owed = RunParts(run)
        """What the backend has not been given yet; it comes with the next record that is sent."""
        self._on_refusal = on_refusal
        self.settled: set[int] = set()
        """The rows of a write that failed half way which it has taken or refused."""
        self._refused_in_a_row = 0

    def write(self, rows: list[Row], *, again: bool = False) -> None:
        """Write rows; `again` says that the destination may have some of them already."""
        self._settle(rows, again=again)
        self.settled.clear()

    def _settle(self, rows: list[Row], *, again: bool) -> None:
        rows = [row for row in rows if row[0] not in self.settled]
        if not rows:
            return
        try:
            written = self._send([record for _, record in rows], again=again)
        except PermanentBackendError as fault:
            self._refuse(rows, fault)
            return
        self._refused_in_a_row = 0
        self.taken += len(rows)
        self.present += len(rows) - written
        self.settled.update(number for number, _ in rows)

    def _send(self, records: list[Record], *, again: bool) -> int:
        """Write the records, or what is missing of them, and count it."""
        if again:
            records = [dataclasses.replace(records[0], run=self.owed.run), *records[1:]]
            left = missing(self.backend, records)
            kept = set(map(id, left))
            self.owed.take(record for record in records if id(record) not in kept)
            records = left
        if not records:
            return 0
        self.backend.write([self.owed.added_to(records[0]), *records[1:]])
        self.owed = RunParts()
        return len(records)

    def _refuse(self, rows: list[Row], fault: PermanentBackendError) -> None:
        """Find the rows that the backend refuses; after several in a row believe it that it refuses all."""
        if len(rows) > 1 and self._refused_in_a_row < _HOPELESS:
            middle = len(rows) // 2
            self._settle(rows[:middle], again=True)
            self._settle(rows[middle:], again=True)
            return
        self._refused_in_a_row += len(rows)
        self.refused.extend(number for number, _ in rows)
        self.settled.update(number for number, _ in rows)
        self._on_refusal(fault, rows[0][1])


def missing(backend: Backend, records: list[Record]) -> list[Record]:
    """Leave out what the destination already has, asking for parts in which no two records share source and step."""
    parts: list[dict[tuple[str, int], Record]] = [{}]
    for record in records:
        if (record.source, record.step) in parts[-1]:
            parts.append({})
        parts[-1][record.source, record.step] = record
    left: list[Record] = []
    for part in parts:
        found = backend.present(list(part.values())) or ()
        left.extend(record for key, record in part.items() if key not in found)
    return left
