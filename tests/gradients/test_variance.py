"""Sums about a centre that ranks share: what they add up to is as exact as one look at everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.moments import MAX, MIN, SQUARES, SUM, Rows
from gradtrack.gradients.variance import CentredSums, centres_between, sums_around, take_back
from tests.gradients.test_deviations import exact_variance

parts_of = st.lists(st.lists(st.floats(-1.0, 1.0).map(lambda x: round(x, 6)), max_size=8), min_size=1, max_size=5)
offsets = st.sampled_from([0.0, 1.0, -3.0, 1e6, -1e9, 1e12])


def together(parts: list[list[Tensor]]) -> tuple[Rows, CentredSums]:
    """Merge what ranks have of some parameters, by what they would send."""
    group_of = np.arange(len(parts[0]))
    rows = [Measurer("torch").measure(part, group_of, len(part)).rows for part in parts]
    counts = [np.array([tensor.numel() for tensor in part]) for part in parts]
    centres = centres_between(np.min(rows, axis=0)[:, MIN], np.max(rows, axis=0)[:, MAX])
    sums = np.sum(rows, axis=0)
    sums[:, [SUM, SQUARES]] = np.sum(
        [sums_around(*one, centres, 0) for one in zip(parts, rows, counts, strict=True)], axis=0
    )
    return sums, take_back(sums, centres, np.sum(counts, axis=0).astype(float))


def tensors_of(values: list[list[float]], offset: float, spread: float) -> list[Tensor]:
    """Return a tensor for each rank."""
    return [torch.tensor(one, dtype=torch.float64) * spread + offset for one in values]


@given(parts_of, offsets, st.sampled_from([1.0, 1e-3]))
def test_parts_have_the_variance_of_the_whole(values: list[list[float]], offset: float, spread: float) -> None:
    """To 1e-6 by the arithmetic of fractions, whatever the mean and however the elements are spread over ranks."""
    parts = tensors_of(values, offset, spread)
    _, found = together([[part] for part in parts])
    count = sum(map(len, parts))
    expected = exact_variance(parts) * (count - 1) if count > 1 else 0.0
    assert found.squares[0] == pytest.approx(expected, rel=1e-6, abs=max(1.0, abs(offset)) ** 2 * 1e-28)


@given(parts_of, offsets)
def test_the_sums_themselves_come_back(values: list[list[float]], offset: float) -> None:
    """Mean and norm are those of the elements, though they were sent as differences to a centre."""
    parts = tensors_of(values, offset, 1.0)
    rows, _ = together([[part] for part in parts])
    whole = torch.cat(parts)
    assert rows[0, SUM] == pytest.approx(float(whole.sum()), rel=1e-12, abs=1e-12)
    assert rows[0, SQUARES] == pytest.approx(float(whole.square().sum()), rel=1e-12, abs=1e-12)


def test_groups_vary_by_the_means_of_their_parts_too() -> None:
    """The variance over several parameters is exact as well, those of one element included."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(size, generator=generator, dtype=torch.float64) for size in (1, 7, 40)]
    parts = [[1e9 + part for part in draw], [1e9 + part.flip(0)[:0] for part in draw], [1e9 - part for part in draw]]
    _, found = together(parts)
    deviations = found.deviations(np.array([0, 1, 2]), np.array([0, 1, 1]), 2)
    for position, group in enumerate(((0,), (1, 2))):
        elements = [part[index] for part in parts for index in group]
        expected = exact_variance(elements) * (sum(map(len, elements)) - 1)
        assert deviations.groups[position] == pytest.approx(expected, rel=1e-6)
    everything = [tensor for part in parts for tensor in part]
    assert deviations.total == pytest.approx(exact_variance(everything) * (sum(map(len, everything)) - 1), rel=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.0, 2.0, 1.5), (-4.0, -3.0, -3.5), (1.0, 2.1, 0.0), (-1.0, 1.0, 0.0), (3.0, 3.0, 3.0), (np.inf, -np.inf, 0.0)],
)
def test_only_what_lies_close_together_has_a_centre(low: float, high: float, expected: float) -> None:
    """Elsewhere the sums are sent as they are, and nothing is read twice."""
    assert centres_between(np.array([low]), np.array([high])).tolist() == [expected]
