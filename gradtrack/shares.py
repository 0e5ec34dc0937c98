"""Which of several pairs looks at a parameter that their models share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradtrack.pair import Pair


class Shares:
    """The division of parameters among pairs, so that every gradient is measured and clipped once.

    A parameter belongs to the pairs whose optimizers own it, and one that no optimizer owns to the first pair whose
    model has it. Pairs whose optimizers own the same parameter step it in turns, and each looks at it before its own.
    """

    def __init__(self) -> None:
        self._known: tuple[object, ...] = ()
        self._elsewhere: list[frozenset[int]] = []

    def elsewhere(self, pair: Pair, pairs: Sequence[Pair]) -> frozenset[int]:
        """Return the ids of those parameters of a pair that are for the others to look at."""
        tables = [one.table for one in pairs]
        owned = [list(map(id, one.owned())) for one in pairs]
        if (tables, owned) != self._known:
            self._known = tables, owned
            self._elsewhere = divide([list(map(id, table.everything)) for table in tables], owned)
        return self._elsewhere[pairs.index(pair)]


def divide(held: Sequence[Iterable[int]], owned: Sequence[Iterable[int]]) -> list[frozenset[int]]:
    """Return for each pair what it leaves to others of what its model holds, by what its optimizers own."""
    owners = [frozenset(ids) for ids in owned]
    taken = frozenset().union(*owners)
    found = []
    for ids, own in zip(held, owners, strict=True):
        mine = frozenset(ids)
        found.append((mine & taken) - own)
        taken |= mine
    return found
