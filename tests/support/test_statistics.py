"""Means, medians and cosines of numbers that may be few, or not finite."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.support.statistics import cosine, mean, median

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1)


@given(numbers)
def test_mean_and_median_are_those_of_the_standard_library(values: list[float]) -> None:
    """They take any iterable."""
    assert mean(iter(values)) == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert median(iter(values)) == statistics.median(values)


def test_nothing_has_no_mean() -> None:
    """Of nothing there is None, and what is not finite goes through."""
    assert (mean([]), median([])) == (None, None)
    assert mean([math.inf, 1.0]) == math.inf
    assert math.isnan(mean([math.inf, -math.inf]) or 0.0)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1))
def test_cosine_is_that_of_the_vectors(pairs: list[tuple[float, float]]) -> None:
    """It is between -1 and 1, 1 of a vector with itself, and NaN of the zero vector."""
    first, second = np.array(pairs).T
    found = cosine(float(first @ second), float(first @ first), float(second @ second))
    if not (first @ first > 0 and second @ second > 0):
        assert math.isnan(found)
    elif min(first @ first, second @ second) > 1e-280:  # below, the squares have lost digits
        expected = float(first / np.linalg.norm(first) @ (second / np.linalg.norm(second)))
        assert found == pytest.approx(expected, abs=1e-6)
        assert -1.0 <= found <= 1.0
        assert cosine(float(first @ first), float(first @ first), float(first @ first)) == pytest.approx(1.0)


@pytest.mark.parametrize("squares", [(0.0, 1.0), (1.0, 0.0), (math.inf, 1.0), (1.0, math.nan)])
def test_cosine_with_what_has_no_direction(squares: tuple[float, float]) -> None:
    """A vector that is zero or not finite has none."""
    assert math.isnan(cosine(1.0, *squares))
