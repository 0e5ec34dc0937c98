"""Histograms of gradients, against numpy's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.gradients.moments import EDGES, count_elements, to_histogram

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
POWERS = st.builds(lambda sign, power: sign * 2.0**power, st.sampled_from([-1.0, 1.0]), st.integers(-70, 127))


@given(st.lists(st.lists(FLOATS | POWERS, max_size=20), min_size=1, max_size=4))
def test_counts_are_numpy_s(rows: list[list[float]]) -> None:
    """Every finite element is in the bucket of its size, an edge belongs to the bucket above it."""
    tensors = [torch.tensor(row, dtype=torch.float32) for row in rows]
    counts = count_elements(tensors, range(len(rows)), len(rows))
    for row, found in zip(tensors, counts, strict=True):
        finite = row[torch.isfinite(row)].double().numpy()
        assert found.tolist() == np.histogram(finite, EDGES)[0].tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_counted(dtype: torch.dtype) -> None:
    """Half precision is counted as what it is, and nothing is counted twice or left out."""
    values = torch.tensor([-3.0, -1.0, 0.0, 0.75, 1.0, 6.0e-8, float("nan"), float("inf")], dtype=dtype)
    (counts,) = count_elements([values], [0], 1)
    assert counts.tolist() == np.histogram(values[:-2].double().numpy(), EDGES)[0].tolist()


def test_tensors_of_a_group_are_counted_together() -> None:
    """A group has the elements of all its tensors, whatever their shape, also of those that are no block of memory."""
    first, second = torch.randn(30, 20), torch.randn(7)
    counts = count_elements([first.t(), second, torch.zeros(0)], [1, 1, 0], 2)
    everything = torch.cat([first.reshape(-1), second]).double().numpy()
    assert counts.tolist() == [[0.0] * len(counts[0]), np.histogram(everything, EDGES)[0].tolist()]


def test_large_tensors_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a large tensor add up."""
    monkeypatch.setattr("gradtrack.gradients.moments._PART", 16)
    values = torch.randn(1001)
    assert count_elements([values], [0], 1).sum() == 1001


def test_what_is_beyond_the_buckets_is_in_the_outermost() -> None:
    """A float64 beyond every edge is not lost."""
    (counts,) = count_elements([torch.tensor([-1e300, 1e300], dtype=torch.float64)], [0], 1)
    assert (counts[0], counts[-1]) == (1.0, 1.0)


def test_histogram_is_cut_to_what_is_there() -> None:
    """Empty buckets outside the elements are left out, and no elements are no histogram."""
    (counts,) = count_elements([torch.tensor([0.75, 3.0])], [0], 1)
    found = to_histogram(counts)
    assert found is not None
    assert (found.edges, found.counts) == ((0.5, 1.0, 2.0, 4.0), (1.0, 0.0, 1.0))
    assert to_histogram(np.zeros(len(EDGES) - 1)) is None
