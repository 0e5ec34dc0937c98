"""The differences between the norms of ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.gradients.distributed.merge import Spread
from gradtrack.gradients.moments import NAN, SQUARES, WIDTH
from gradtrack.reports import RankStatistics

NORMS = st.floats(0.0, 1e100)


def spread_of(norms: list[float], bad: frozenset[int] = frozenset()) -> RankStatistics:
    """Return what ranks with these norms learn of each other; `bad` ones have a NaN beside them."""
    sums, highs = [], []
    for rank, norm in enumerate(norms):
        rows = np.zeros((2, WIDTH))
        rows[:, SQUARES] = norm * norm / 2
        rows[1, NAN] = float(rank in bad)
        with mock.patch("torch.distributed.get_rank", return_value=rank):
            sums.append(Spread.sums(rows, 0))
            highs.append(Spread.highs(rows, 0))
    found: dict[str, Any] = Spread.read(np.sum(sums, axis=0), np.max(highs, axis=0), len(norms))
    return RankStatistics(**found)


@given(st.lists(NORMS, min_size=1, max_size=9))
def test_the_ends_the_mean_and_who_has_the_ends(norms: list[float]) -> None:
    """The smallest and the largest norm are right to 1e-9, and the ranks named have them."""
    found = spread_of(norms)
    assert found.num_ranks == len(norms)
    assert found.norm_min == pytest.approx(min(norms), rel=1e-9)
    assert found.norm_max == pytest.approx(max(norms), rel=1e-9)
    assert norms[found.norm_min_rank] == pytest.approx(min(norms), rel=1e-9)
    assert norms[found.norm_max_rank] == pytest.approx(max(norms), rel=1e-9)
    assert found.norm_mean == pytest.approx(np.mean(norms), rel=1e-9)
    assert found.norm_std == pytest.approx(np.std(norms), rel=1e-3, abs=1e-7 * max(norms))


def test_equal_ranks_have_no_spread() -> None:
    """Replicas that agree differ by nothing at all."""
    assert spread_of([0.1, 0.1, 0.1]).norm_std == 0.0


def test_a_norm_beyond_the_range_is_no_nan() -> None:
    """The bits of an infinity are not mixed with a rank."""
    assert spread_of([1e200, 1.0]).norm_max > 1e200


@given(st.sets(st.integers(0, 4)))
def test_ranks_with_something_not_finite(bad: set[int]) -> None:
    """Their number and the first of them are known."""
    found = spread_of([1.0] * 5, frozenset(bad))
    assert found.nonfinite_ranks == len(bad)
    assert found.first_nonfinite_rank == min(bad, default=None)
