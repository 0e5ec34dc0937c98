"""What a call shows is what float64 says of its output and its gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradtrack.analyzers.flow.call import (
    SIGMOID_LIMIT,
    TANH,
    TANH_LIMIT,
    Node,
    row_squares,
    take_gradient,
    take_output,
)
from gradtrack.analyzers.tools.samples import MOST

SHAPES = [(2, 1), (64, 10), (3, 5, 7), (40, 64), (4, 3, 300), (2, 6, 5, 5), (1, 1), (700, 130)]


def looked(output: Tensor, gradient: Tensor, axis: int, kind: str) -> Node:
    """Return what a look finds."""
    found = Node("layer", kind, True, axis, output.shape[axis])
    take_output(found, output)
    take_gradient(found, gradient)
    return found


@given(
    shape=st.sampled_from(SHAPES),
    channels=st.booleans(),
    kind=st.sampled_from(["Linear", "RNN_TANH"]),
    size=st.sampled_from([0.0, 1e-30, 0.5, 2.0, 5.0, 1e30]),
    broken=st.sampled_from([None, math.nan, math.inf, -math.inf]),
    seed=st.integers(0, 1000),
)
def test_a_look_finds_what_float64_says(
    shape: tuple[int, ...], channels: bool, kind: str, size: float, broken: float | None, seed: int
) -> None:
    """Ranges and counts are those of the elements; sums agree to six digits."""
    torch.manual_seed(seed)
    output, gradient = torch.randn(shape) * size, torch.randn(shape) * size
    output = output.tanh() if kind == "RNN_TANH" else output
    if broken is not None:
        output.view(-1)[seed % output.numel()] = broken
    axis = 1 if channels else len(shape) - 1
    one = looked(output, gradient, axis, kind)
    assert one.finite == (broken is None)
    assert one.delta == pytest.approx(float(gradient.double().norm()), rel=1e-6)
    if one.finite:
        units = output.movedim(axis, -1).reshape(-1, shape[axis]).double().numpy()
        assert one.unit_min is not None
        assert one.unit_max is not None
        np.testing.assert_array_equal(one.unit_min, units.min(0))
        np.testing.assert_array_equal(one.unit_max, units.max(0))
        if output.numel() <= MOST:
            beyond = [(np.abs(units) > np.float32(limit)).mean() for limit in (TANH_LIMIT, SIGMOID_LIMIT)]
            if kind == "RNN_TANH":
                beyond = [(np.abs(units) > np.float32(TANH)).mean(), 0.0]
            assert [one.beyond_tanh, one.beyond_sigmoid] == pytest.approx(beyond)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_have_their_numbers(dtype: torch.dtype) -> None:
    """What is not float32, and what is not contiguous, has the numbers of its elements as well."""
    torch.manual_seed(0)
    values = torch.randn(30, 8).to(dtype)
    for output in (values, values.float().T):
        found = looked(output, output, 1, "Linear")
        units = output.double().numpy()
        np.testing.assert_array_equal(found.unit_max, units.max(0))
        assert found.delta == pytest.approx(float(np.linalg.norm(units)), rel=1e-6)


@given(
    st.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)),
    st.integers(1, 6),
    st.integers(1, 3000),
    st.lists(st.sampled_from((0.0, 1e-30, 1e-20, 1e-14, 1e-8, 1.0, 1e6, 1e15, 1e20, 3e37)), min_size=1, max_size=4),
    st.integers(0, 100),
)
def test_rows_agree_with_float64(dtype: torch.dtype, rows: int, width: int, sizes: list[float], seed: int) -> None:
    """Rows of any magnitude, also side by side, have the sums that numpy finds in float64."""
    torch.manual_seed(seed)
    scales = torch.tensor(sizes, dtype=torch.float64).repeat(rows)[:rows, None]
    values = (torch.rand(rows, width, dtype=torch.float64) * scales).to(dtype)
    wide = values.to(torch.complex128 if dtype.is_complex else torch.float64).numpy()
    np.testing.assert_allclose(row_squares(values), np.square(np.abs(wide)).sum(1), rtol=3e-6)


@pytest.mark.parametrize("width", [4096, 4097, 100_000, 1_048_577])
def test_wide_rows_keep_their_digits(width: int) -> None:
    """Rows of one number, which lose most where they are added up in float32, are right at any width."""
    values = torch.full((2, width), 0.1)
    np.testing.assert_allclose(row_squares(values), [width * float(values[0, 0]) ** 2] * 2, rtol=3e-6)


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of everything that operations make anew."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {
            one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)
        }
        made = (one.untyped_storage() for one in tree_leaves(out) if isinstance(one, torch.Tensor))
        self.largest = max([self.largest, *(one.nbytes() for one in made if one.data_ptr() not in known)])
        return out


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30])
def test_wide_rows_are_not_copied(value: float) -> None:
    """The gradient of logits may be a large part of what memory there is: at most a small part of it is copied."""
    rows = torch.full((400, 50_257), value)
    with Made() as made:
        np.testing.assert_allclose(row_squares(rows), 50_257.0 * value**2, rtol=1e-6)
    assert 0 < made.largest <= rows.nbytes // 32


def test_what_is_not_finite_shows() -> None:
    """A NaN or an infinity is in the sum of its row, and of no other."""
    values = torch.ones(3, 5)
    values[0, 0], values[1, 1] = math.nan, -math.inf
    np.testing.assert_allclose(row_squares(values), [math.nan, math.inf, 5.0], rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 5000)])
def test_nothing_has_no_squares(shape: tuple[int, int]) -> None:
    """A batch, or a row, without elements is no fault."""
    np.testing.assert_array_equal(row_squares(torch.zeros(shape)), np.zeros(shape[0]))
