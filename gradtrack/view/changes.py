"""How a number of one run stands to that of another, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from gradtrack.reports.step import spell
from gradtrack.view.tables import number

Pair = tuple[str, int | float | None, int | float | None]
"""A name with the number of the first run and of the second; None is one that is not known."""
_SHARE: Final = "clip rate"
_ONLY_ONE: Final = 1e-12


def in_words(rows: Sequence[Pair]) -> list[tuple[str, ...]]:
    """Return names with both numbers as a person reads them."""
    return [(name, _in_digits(name, before), _in_digits(name, after)) for name, before, after in rows]


def _in_digits(name: str, value: int | float | None) -> str:
    if name.startswith(_SHARE) and value is not None:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else number(value)


def with_ratios(rows: Sequence[Pair]) -> list[tuple[str, ...]]:
    """Return the same with the ratio of the second number to the first."""
    return [
        (*words, f"{ratio:.3g}" if math.isfinite(ratio := _ratio(pair)) else "–")
        for words, pair in zip(in_words(rows), rows, strict=True)
    ]


def _ratio(pair: Pair) -> float:
    _, before, after = pair
    return math.nan if not before or after is None else after / before


def most_changed(rows: Sequence[Pair], count: int) -> list[Pair]:
    """Return so many rows that differ most, in their order: what is no number in one run differs more than any.

    What only one run has does not differ, but is told before what is equal.
    """

    def change(index: int) -> float:
        if None in rows[index]:
            return _ONLY_ONE
        ratio, (before, after) = abs(_ratio(rows[index])), spell(list(rows[index][1:]))
        return abs(math.log(ratio)) if 0.0 < ratio < math.inf else 0.0 if before == after else math.inf

    return [rows[index] for index in sorted(sorted(range(len(rows)), key=change, reverse=True)[:count])]
