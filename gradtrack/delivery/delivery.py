"""The way of a record to the backends: validated, journaled, queued, and delivered by a worker for each."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from gradtrack.backends.base import Backend
from gradtrack.delivery.destinations import consent
from gradtrack.delivery.journal.offsets import Offsets, offsets_path
from gradtrack.delivery.journal.writing import Journal
from gradtrack.delivery.locks import ForkGuard
from gradtrack.delivery.status import Faults, describe, log_summary
from gradtrack.delivery.worker import Worker
from gradtrack.delivery.writer import QUEUE_ROWS, Feed
from gradtrack.records import Record, RunInfo, is_valid, validate
from gradtrack.support.interrupts import pass_on


class Delivery:
    """Hands every record to every backend: a tracker that is slow, down or broken neither slows nor stops training.

    Inline backends take a record within the step; every other has a worker, behind the journal. On any rank but 0 rows
    go to the journal only.
    """

    def __init__(
        self,
        backends: Mapping[str, Backend],
        *,
        run: RunInfo,
        journal: Journal | None = None,
        rank: int = 0,
        guard: ForkGuard | None = None,
        close_timeout_seconds: float = 10.0,
        queue_rows: int = QUEUE_ROWS,
    ) -> None:
        self.backends = dict(backends)
        self._run, self._journal, self._timeout = run, journal, close_timeout_seconds
        self._guard = guard or ForkGuard()
        if journal is not None:
            self._guard.on_fork = journal.abandon
        self._num_rows = 0
        self._writing = threading.RLock()
        """Held while rows go to the journal and the feeds, so that they come there in their order."""
        self._summed_up = False
        self._invalid = Faults("metrics")
        self._journal_fault: Exception | None = None
        self._journal_faults = Faults("journal")
        talking = self.backends if rank == 0 else {}
        self._inline = {name: _Inline(name, backend) for name, backend in talking.items() if backend.inline}
        self._offsets = Offsets(None)
        self._workers = {
            name: Worker(name, backend, Feed(journal, limit=queue_rows), run, self._offsets)
            for name, backend in talking.items()
            if not backend.inline
        }
        for name, worker in self._workers.items():
            try:
                self.backends[name].before_end(functools.partial(self._await_flush, worker))
            except Exception as fault:
                pass_on(fault)
                worker.faults.note(fault, "rows that wait when its run is ended are left to a replay")
            worker.start()

    def write(self, record: Record) -> None:
        """Journal a record and send it on its way; a forked copy of the process does nothing."""
        if self._guard.forked:
            self._guard.silent()
            return
        if not is_valid(record.metrics):
            record, bad = validate(record)
            for name, reason in bad.items():
                self._invalid.note(f"{name!r} at step {record.step}: {reason}", "it is left out of the row")
        with self._writing:
            number, self._num_rows = self._num_rows, self._num_rows + 1
            journal = self._journal
            urgent = not math.isfinite(record.metrics.get("train/grad_norm", 0.0))
            kept = journal is not None and journal.append(number, record, urgent=urgent)
            if journal is not None and (journal.fault is not None or self._offsets.path is None):
                self._note(journal)
            for inline in self._inline.values() if self._inline else ():
                inline.write(record if number else dataclasses.replace(record, run=self._run))
            for worker in self._workers.values():
                worker.feed.offer(number, record, kept=kept)

    def flush(self) -> None:
        """Make everything that was delivered durable, waiting for the trackers no longer than for a close."""
        if self._guard.silent():
            return
        end = time.monotonic() + self._timeout
        asked = [worker.ask_flush() for worker in self._workers.values()]
        for inline in self._inline.values():
            inline.attempt(inline.backend.flush)
        if self._journal is not None:
            self._journal.sync(end - time.monotonic())
        for done in asked:
            done.wait(max(end - time.monotonic(), 0.0))

    def _await_flush(self, worker: Worker) -> None:
        """Let a backend have every row so far, waiting for it no longer than for a close."""
        worker.ask_flush().wait(self._timeout)

    def close(self, *, failed: bool = False) -> None:
        """Deliver what is left until the time is over, let every backend go, and say what did not arrive."""
        if self._summed_up or self._guard.silent():
            return
        end, left = time.monotonic() + self._timeout, list(self._workers.values())
        try:
            self._let_go(left, end, failed=failed)
        except BaseException:  # an interrupt from the keyboard: the user is told what is left as well
            for worker in left:
                worker.ask_close(failed=failed, end=end)
                if not worker.join(0.0):
                    worker.give_up("it was not waited for to the end")
            raise
        finally:
            self._offsets.save()
            self._summed_up = True
            if self._num_rows:
                directory = None if self._journal is None else self._journal.directory
                allowed = [] if self._journal is None else consent(self._journal.backends, self._journal.directory)
                log_summary(self._run.run_id, self.status(), self.journal_status(), directory, consent=allowed)

    def terminate(self) -> None:
        """Close from another thread than the training's, which waits with its next row from here on."""
        if self._writing.acquire(timeout=self._timeout):
            self.close(failed=True)  # the lock is kept: the process ends

    def _let_go(self, left: list[Worker], end: float, *, failed: bool) -> None:
        """Let every backend and the journal end within the time; the workers that did are taken out of the list."""
        for worker in left:
            worker.feed.reach(self._num_rows)
            worker.ask_close(failed=failed, end=end)
        for inline in self._inline.values():
            inline.close(failed=failed)
        while left:
            if not left[0].join(end - time.monotonic()):
                left[0].give_up(f"it did not finish within {self._timeout:g} seconds")
            left.pop(0)
        if self._journal is not None:
            self._journal.close(max(end - time.monotonic(), 1.0))

    def status(self) -> dict[str, dict[str, Any]]:
        """Tell for each backend what it has taken and what it has not, and why."""
        found = {name: inline.status() for name, inline in self._inline.items()}
        for name, worker in self._workers.items():
            feed, taken, refused = worker.feed, worker.writer.taken, len(worker.writer.refused)
            pending = max(feed.accepted - taken - refused - feed.lost, 0)
            lost = min(feed.unkept, pending) if self._summed_up else 0  # with the memory that alone holds them
            reasons = [worker.faults.last or ""]
            if feed.unkept:
                reasons.append(f"{feed.unkept} rows are only in memory, since the journal could not be written")
            found[name] = status_of(
                accepted=feed.accepted,
                acknowledged=taken,
                pending=pending - lost,
                refused=refused,
                lost=feed.lost + lost,
                lagging=feed.lagging,
                why="; ".join(filter(None, reasons)) or None,
                unsettled=worker.unsettled,
            )
        return {name: found[name] for name in self.backends if name in found}

    def journal_status(self) -> dict[str, Any] | None:
        """Tell what the journal has and where it lies; None where there is none."""
        journal = self._journal
        if journal is None:
            return None
        return {
            "path": None if journal.path is None else str(journal.path),
            "rows": journal.rows,
            "failed": journal.failed,
            "removed_parts": journal.removed,
            "fault": None if journal.fault is None else describe(journal.fault),
        }

    def _note(self, journal: Journal) -> None:
        """Tell of a new fault of the journal, and find out where its offsets belong."""
        if journal.fault is not None and journal.fault is not self._journal_fault:
            self._journal_fault = journal.fault
            self._journal_faults.note(journal.fault, "rows stay in memory for the trackers")
        if self._offsets.path is None and journal.parts:
            self._offsets.path = offsets_path(journal.parts[0])


class _Inline:
    """A backend that takes rows within the step."""

    def __init__(self, name: str, backend: Backend) -> None:
        self.backend = backend
        self._accepted = self._taken = 0
        self._faults = Faults(name)

    def write(self, record: Record) -> None:
        self._accepted += 1
        if self.attempt(lambda: self.backend.write([record])):
            self._taken += 1

    def close(self, *, failed: bool) -> None:
        self.attempt(lambda: self.backend.close(failed=failed))

    def attempt(self, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as fault:
            pass_on(fault)
            self._faults.note(fault, "it misses rows")
            return False
        return True

    def status(self) -> dict[str, Any]:
        lost = self._accepted - self._taken
        return status_of(accepted=self._accepted, acknowledged=self._taken, lost=lost, why=self._faults.last)


_NUMBERS: Final = ("accepted", "acknowledged", "pending", "refused", "lost", "dropped")


def status_of(**known: Any) -> dict[str, Any]:
    """Return the status of a backend: the numbers of its rows, of which it has dropped the refused and the lost."""
    found = {**dict.fromkeys(_NUMBERS, 0), "lagging": False, "why": None, "unsettled": None, **known}
    return found | {"dropped": found["refused"] + found["lost"]}
