"""The rolling median, whose values come one by one or several together."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from gradtrack.health.rule import RollingMedian


@given(st.integers(1, 12), st.lists(st.lists(st.floats(-1e6, 1e6), max_size=16), min_size=1, max_size=8))
def test_values_together_are_kept_as_one_by_one(size: int, parts: list[list[float]]) -> None:
    """The last ones, in their order and by size, with the median of them."""
    together, single, kept = RollingMedian(size), RollingMedian(size), list[float]()
    for part in parts:
        together.extend(part)
        for value in part:
            single.push(value)
        kept = [*kept, *part][-size:]
        assert together.state_dict() == single.state_dict() == kept
        assert [together[index] for index in range(len(together))] == sorted(kept)
        if kept:
            assert together.median == single.median == statistics.median(kept)
