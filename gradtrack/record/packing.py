"""The way of usual steps' rows: into the tail at once, and together into the journal and to the backends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, final

from gradtrack.record.faults import Faults
from gradtrack.record.feed import Row
from gradtrack.record.forks import ForkGuard
from gradtrack.record.journal import Journal
from gradtrack.record.packed import NO_EPOCH, NO_LOSS, Terms, number_of, pack, unpack_row
from gradtrack.record.tail import CAN_BE_KEPT, END, Tail
from gradtrack.signals import pass_on

_MANY: Final = 1024
"""So many rows become lines of the journal at once, fewer with the next sync."""
_MOST: Final = 4096
"""So many do so within the step, where nobody else has come to it."""
_MOST_TERMS: Final = 8
_IN_MEMORY: Final = "rows stay in memory until they are lines of the journal"
Put = Callable[[int, float, int | None, float | None, float, float, bytes], None]
Deliver = Callable[[Sequence[Row], bool], object]


class Numbers:
    """Numbers the rows of a run, under a lock that is held until a row has its place."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a handler of a signal may come between
        self.following = 0

    def take(self) -> int:
        """Return the number of the next row."""
        with self.lock:
            number, self.following = self.following, self.following + 1
            return number


@final
class PackedRows:
    """Takes in rows of usual steps, which become lines and records when another row comes or somebody asks.

    `deliver` is called with rows in their order, and whether the journal has them. `settling` is held then, as it is
    while any other row goes its way.
    """

    def __init__(
        self,
        journal: Journal,
        run_id: str,
        *,
        numbers: Numbers,
        guard: ForkGuard,
        settling: AbstractContextManager[Any],
        deliver: Deliver,
    ) -> None:
        self.journal, self.numbers, self.guard = journal, numbers, guard
        self.packed: list[bytes] = []
        self.tail: Tail | None = None
        self.round = 0
        """Counts how often the terms began anew."""
        self.faults = Faults("journal")
        self._run_id, self._settling, self._deliver = run_id, settling, deliver
        self._terms: list[Terms] = []
        self._failed, self._all_kept = False, True
        journal.syncer.before = self.settle_by_itself

    def way(self, terms: Terms) -> Put | None:
        """Return what takes rows of these terms, None where each has to be written for itself."""
        journal = self.journal
        if journal.fault is not None or not journal.parts or self.guard.forked or not CAN_BE_KEPT:
            return None
        entry = self.enter(terms)
        return None if self.tail is None else _Way(self, terms, entry).put

    def enter(self, terms: Terms) -> tuple[int, int]:
        """Let the tail have rows of these terms; return by which number they name them, and until which round ends."""
        with self._settling:
            if len(self._terms) >= _MOST_TERMS and terms not in self._terms:
                self._begin_anew()
            if terms not in self._terms:
                self._terms.append(terms)
                self._tell_terms()
            return self._terms.index(terms), self.round

    def _begin_anew(self) -> None:
        """Forget all terms, which no row has by then."""
        while True:
            self.settle()
            with self.numbers.lock:
                if not self.packed:
                    self._terms, self.round = [], self.round + 1
                    return

    def _tell_terms(self) -> None:
        if self._failed:
            return
        try:
            if self.tail is None:
                self.tail = Tail(self.journal.parts[0].with_suffix(".tail"), self._run_id, self.journal.rank)
            self.tail.tell(self._terms)
        except (OSError, ValueError) as fault:
            self.faults.note(fault, "every row is a line of the journal at once")
            self._failed = True
            self.settle()
            self.close()

    def number_alone(self) -> int:
        """Settle what is there, and return the number of a row that goes its own way while `settling` is held."""
        while True:
            self.settle()
            with self.numbers.lock:
                if not self.packed or self.guard.forked:
                    return self.numbers.take()

    def settle(self) -> None:
        """Make lines of the journal of the rows that are none yet, and deliver them.

        Who is interrupted here leaves the rest to the next call.
        """
        if not self.packed or self.guard.forked:
            return
        with self._settling:
            rows = [unpack_row(self._terms, row) for row in list(self.packed)]
            if not rows:  # somebody else came first
                return
            kept = self.journal.append_all(rows)
            self._all_kept = self._all_kept and kept
            self._deliver(rows, kept)
            with self.numbers.lock:
                self.packed = [row for row in self.packed if number_of(row) > rows[-1][0]]
                if not self.packed and self.tail is not None:
                    self._reuse(self.tail)

    def _reuse(self, tail: Tail) -> None:
        """Use the room of rows that are lines by now; a tail that somebody has removed has to be made anew."""
        if tail.is_unlinked:
            self.close()
            self._tell_terms()
        elif self._all_kept:
            tail.rewind()

    def settle_by_itself(self) -> None:
        """Do the same in a thread that nobody listens to."""
        try:
            self.settle()
        except Exception as fault:
            pass_on(fault)
            self.faults.note(fault, _IN_MEMORY)

    def close(self) -> None:
        """Let go of the tail, and remove it unless it has rows that the journal could not take."""
        with self.numbers.lock:
            tail, self.tail = self.tail, None
            if tail is None:
                return
            if self._all_kept:
                tail.remove()
            else:
                tail.let_go()

    def let_go(self) -> None:
        """Leave the tail to the process that this one is a copy of."""
        if self.tail is not None:
            self.tail.let_go()


@final
class _Way:
    """Takes the rows of one pair, from one training thread."""

    def __init__(self, rows: PackedRows, terms: Terms, entry: tuple[int, int]) -> None:
        self._rows, self._terms = rows, terms
        self._index, self._round = entry

    def put(
        self, step: int, time: float, epoch: int | None, loss: float | None, norm: float, rate: float, total: bytes
    ) -> None:
        """Hand a row to the system."""
        # In one piece, since beside a training each call costs about a microsecond.
        rows, numbers, syncer = self._rows, self._rows.numbers, self._rows.journal.syncer
        epoch, loss = NO_EPOCH if epoch is None else epoch, NO_LOSS if loss is None else loss
        if rows.guard.forked:
            rows.guard.silent()
            return
        if len(rows.packed) >= _MOST:
            rows.settle()
        while True:
            if self._round != rows.round:
                self._index, self._round = rows.enter(self._terms)
            with numbers.lock:
                if self._round != rows.round:  # another thread came between
                    continue
                number, tail = numbers.following, rows.tail
                after = number + 1
                row = pack(after, self._index, step, epoch, time, loss, norm, rate, total, after)
                has_room = tail is not None and tail.position < END
                try:
                    if tail is not None and has_room:
                        tail.put(row)
                except OSError as fault:
                    has_room = False
                    rows.faults.note(fault, "such rows are lines of the journal at once")
                numbers.following = after
                rows.packed.append(row)
                break
        if not has_room:  # nor anything that keeps it but the journal
            rows.settle()
        syncer.dirty = True
        if len(rows.packed) >= _MANY:
            syncer.hurry()
