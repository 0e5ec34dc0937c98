"""The fixed sample of a tensor."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.measure.samples import sample


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 60), st.booleans())
def test_it_takes_the_same_elements_from_every_layout(rows: int, columns: int, most: int, transposed: bool) -> None:
    """At most so many elements, in their logical order, however the tensor lies in memory; a copy, not a view."""
    values = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    tensor = values.t().contiguous().t() if transposed else values
    found = sample(tensor, most)
    assert len(found) <= most
    assert len(found) >= min(rows * columns, most) / (2 + columns)
    assert torch.equal(found, sample(values, most))
    found += 1
    assert torch.equal(tensor, values)


def test_no_column_is_left_out() -> None:
    """A matrix whose width is a power of two is sampled in all of its columns."""
    columns = sample(torch.arange(1024 * 1024).reshape(1024, 1024) % 1024, 4096)
    assert len(set(columns.tolist())) == 1024


def test_complex_numbers_are_two_each() -> None:
    """Real and imaginary parts are elements."""
    assert torch.equal(sample(torch.tensor([1 + 2j])), torch.tensor([1.0, 2.0]))
    assert math.isclose(float(sample(torch.ones(3, requires_grad=True)).sum()), 3.0)
