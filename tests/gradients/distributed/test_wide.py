"""Sums of squares that do not fit into one float64."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradtrack.gradients.distributed import merge as wide
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.moments import Moments, describe, merge

SCALES = st.sampled_from([0.0, 1e-290, 1e-200, 1e-130, 1.0, 1e100, 1e154, 1e250, 1e300])
ONE = np.zeros(1, dtype=np.int64)


def together(parts: list[Tensor]) -> Moments:
    """Measure one parameter of which each rank has a part, as what the ranks send adds up."""
    lows, highs = [], []
    for part in parts:
        here = Measurer("torch").measure([part], ONE, 1)
        rows, high = wide.split(here.rows, here.exponent)
        lows.append(np.concatenate([rows[:, :2], np.ldexp(rows[:, 2:4], here.exponent), rows[:, 4:]], axis=1))
        highs.append(high[:, 0])
    rows = np.sum(lows, axis=0)
    rows[:, 2], rows[:, 3] = np.min(lows, axis=0)[:, 2], np.max(lows, axis=0)[:, 3]
    exponent = wide.join(rows, np.sum(highs, axis=0))
    return Moments(rows, *merge(rows, ONE, 1), exponent)


@given(st.lists(st.tuples(SCALES, st.integers(1, 5)), min_size=1, max_size=5))
def test_parts_of_any_size_have_the_norm_of_the_whole(parts: list[tuple[float, int]]) -> None:
    """Norm, mean and ends are those of all elements in one process, whatever the scale of each part."""
    values = [[scale * (-1.0) ** place * (1 + place) for place in range(count)] for scale, count in parts]
    found = together([torch.tensor(one, dtype=torch.float64) for one in values])
    elements = [Fraction(value) for one in values for value in one]
    described = describe(found.total, len(elements), found.exponent)
    largest = max(abs(element) for element in elements) or Fraction(1)
    norm = float(largest) * math.sqrt(float(sum((element / largest) ** 2 for element in elements)))
    assert found.norm == pytest.approx(norm, rel=1e-12, abs=0.0)
    mean = float(sum(elements) / len(elements))
    assert described["mean"] == pytest.approx(mean, rel=1e-9, abs=float(largest) * 1e-12)
    ends = float(min(elements)), float(max(elements))
    assert (described["min"], described["max"]) == pytest.approx(ends, rel=1e-15, abs=float(largest) * 1e-280)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float64, True), (torch.complex128, True), (torch.float32, False)]
)
def test_which_gradients_need_it(dtype: torch.dtype, expected: bool) -> None:
    """Those of float64, also in complex numbers."""
    assert wide.is_wide(nn.Parameter(torch.ones(1, dtype=dtype))) == expected


def test_a_gradient_may_be_wider_than_its_parameter() -> None:
    """Torch lets a parameter take gradients of another type, or of any."""
    for kind in (torch.float64, None):
        param = nn.Parameter(torch.ones(1))
        param.grad_dtype = kind
        assert wide.is_wide(param)
