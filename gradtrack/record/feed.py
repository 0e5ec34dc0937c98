"""The rows on their way to one backend: a bounded queue, and the journal for what does not fit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Final

from gradtrack.record.journal import Journal
from gradtrack.records import Record

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
        self._next = 0
        self._known_lost: set[int] = set()
        self._reading: Iterator[Row] | None = None

    @property
    def lagging(self) -> bool:
        """Say whether rows wait in the journal because the queue could not hold them."""
        return self.accepted - self._next > len(self._queue)

    @property
    def position(self) -> int:
        """Return the number of the row that comes next."""
        return self._next

    def offer(self, number: int, record: Record, *, kept: bool) -> None:
        """Take a row in, unless it came before; `kept` says that the journal has it."""
        with self._lock:
            if number < self.accepted:
                return
            self.accepted = number + 1
            if len(self._queue) < self._limit:
                self._queue.append((number, record))
            elif not kept:
                self._known_lost.add(number)
                self.lost += 1
            if self._waits:
                self._changed.notify()

    def take(self, limit: int, timeout_seconds: float) -> list[Row]:
        """Give the next rows out, or none when the time is over or `wake` was called."""
        with self._lock:
            if self._next >= self.accepted:
                self._waits = True
                self._changed.wait(timeout_seconds)
                self._waits = False
            stop = self._queue[0][0] if self._queue else self.accepted
            if stop == self._next:
                return self._pop(limit)
        return self._reread(stop, limit)

    def reach(self, count: int) -> None:
        """Know of so many rows: one that was interrupted on its way here is in the journal, or lost."""
        with self._lock:
            self.accepted = max(self.accepted, count)

    def wake(self) -> None:
        """Let a waiting `take` return."""
        with self._lock:
            self._changed.notify()

    def _pop(self, limit: int) -> list[Row]:
        rows: list[Row] = []
        while self._queue and len(rows) < limit and self._queue[0][0] == self._next:
            rows.append(self._queue.popleft())
            self._next += 1
        return rows

    def _reread(self, stop: int, limit: int) -> list[Row]:
        """Read what is missing before `stop` from the journal, and count what is not there either."""
        rows: list[Row] = []
        reading = self._reading or self._open()
        reached = stop
        for number, record in reading:
            if number >= stop:
                break
            rows.append((number, record))
            if len(rows) == limit:
                reached = number + 1
                break
        self._reading = reading if reached < stop else None
        found = {number for number, _ in rows}
        missing = set(range(self._next, reached)) - found - self._known_lost
        with self._lock:
            self.lost += len(missing)
            self._known_lost = {number for number in self._known_lost if number >= reached}
            self._next = reached
        return rows

    def _open(self) -> Iterator[Row]:
        return iter(()) if self._journal is None else self._journal.reread(self._next)
