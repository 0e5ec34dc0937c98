"""Clipping against the definition, and the promise to leave the input alone."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict, deque
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.errors import InputTypeError, UsageError
from gradtrack.functional import clip_gradients, compute_gradient_norm
from tests.functional.strategies import exact_square_sum, flat, gradients


class Pair(NamedTuple):
    """Two gradients under names."""

    weight: object
    bias: object


def shape_of(nested: object) -> object:
    """Return types, dtypes and keys of a nesting, without its numbers."""
    if isinstance(nested, dict):
        return type(nested), [(key, shape_of(value)) for key, value in nested.items()]
    if isinstance(nested, list | tuple | deque):
        return type(nested), [shape_of(item) for item in nested]
    return type(nested), getattr(nested, "dtype", None), getattr(nested, "shape", None)


@given(gradients, st.floats(1e-3, 1e7))
def test_one_factor_for_all_above_the_limit(nested: object, max_norm: float) -> None:
    """Every element is multiplied by max_norm / norm above the limit and is untouched otherwise."""
    clipped, norm = clip_gradients(nested, max_norm)
    values = flat(nested)
    assert norm == pytest.approx(math.sqrt(exact_square_sum(values)), rel=1e-12)
    factor = max_norm / norm if norm > max_norm else 1.0
    # The half-precision tensors of the strategy round to eleven bits, or to steps of 2 ** -24.
    np.testing.assert_allclose(flat(clipped), values * factor, rtol=2.0**-11, atol=2.0**-24)


@given(gradients, st.floats(0.0, 1e7))
def test_the_input_stays_as_it_was_and_shares_nothing(nested: object, max_norm: float) -> None:
    """Types and dtypes come out as they went in, and the numbers of the input do not move."""
    before = flat(copy.deepcopy(nested))
    clipped, _ = clip_gradients(nested, max_norm)
    assert shape_of(clipped) == shape_of(nested)
    np.testing.assert_array_equal(flat(nested), before)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(1e-3, 1e3))
def test_clipping_twice_is_clipping_once(values: list[float], max_norm: float) -> None:
    """What is clipped has at most the limit's norm, and is left alone but for rounding."""
    once, _ = clip_gradients(np.array(values), max_norm)
    twice, norm = clip_gradients(once, max_norm)
    assert norm <= max_norm * (1 + 1e-12)
    np.testing.assert_allclose(twice, once, rtol=1e-12)


def test_agrees_with_torch_on_a_model() -> None:
    """The result is that of torch's own clipping, in all but its 1e-6."""
    parameters = [torch.nn.Parameter(torch.zeros(7, 5)), torch.nn.Parameter(torch.zeros(5))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    clipped, norm = clip_gradients([parameter.grad for parameter in parameters], max_norm=0.5)
    expected = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    assert norm == pytest.approx(float(expected), rel=1e-6)
    for ours, parameter in zip(clipped, parameters, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "container",
    [
        Pair(3.0, None),
        OrderedDict(b=3.0, a=np.ones(2, np.float16)),
        defaultdict(list, a=[torch.ones(2, dtype=torch.bfloat16)]),
        deque([np.float32(3.0), 1 + 2j], maxlen=2),
        (np.ones((2, 2), np.complex64), torch.ones((), dtype=torch.float64)),
    ],
)
@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_containers_and_dtypes_come_back(container: object, max_norm: float) -> None:
    """Named tuples, ordered and default dicts, deques and every floating dtype survive both branches."""
    clipped, norm = clip_gradients(container, max_norm)
    assert shape_of(clipped) == shape_of(container)
    assert compute_gradient_norm(clipped) == pytest.approx(min(norm, max_norm), rel=1e-2)


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_a_result_shares_no_memory_with_the_input(max_norm: float) -> None:
    """Writing into the result later does not reach the gradients, clipped or not."""
    array, tensor = np.ones(3), torch.ones(3)
    clipped, _ = clip_gradients([array, tensor], max_norm)
    assert isinstance(clipped[0], np.ndarray)
    assert isinstance(clipped[1], torch.Tensor)
    clipped[0][...] = 7.0
    clipped[1].fill_(7.0)
    assert array.tolist() == tensor.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("value", [np.full(10_000, 6e4, np.float16), torch.full((10_000,), 6e4).half()])
def test_half_precision_neither_overflows_nor_flushes(value: np.ndarray | torch.Tensor) -> None:
    """A norm of six million, which float16 cannot hold, is clipped to 100 in float16."""
    clipped, norm = clip_gradients(value, 100.0)
    assert norm == pytest.approx(float(value[0]) * 100.0)
    assert clipped.dtype == value.dtype
    assert compute_gradient_norm(clipped) == pytest.approx(100.0, rel=1e-3)


@pytest.mark.parametrize("value", [np.full(4, 1e38, np.float32), torch.full((4,), 1e38)])
def test_a_factor_below_the_range_of_float32_keeps_its_digits(value: np.ndarray | torch.Tensor) -> None:
    """From 2e38 to 2e-6 the factor is 1e-44, which float32 holds in no more than four bits."""
    clipped, _ = clip_gradients(value, 2e-6)
    assert compute_gradient_norm(clipped) == pytest.approx(2e-6, rel=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_stay_sparse(layout: torch.layout) -> None:
    """Layout, shape and places are kept, and the values are clipped."""
    dense = torch.tensor([[0.0, 3.0], [4.0, 0.0]])
    places, parts = torch.tensor([[0, 0, 1], [1, 1, 0]]), torch.tensor([1.0, 2.0, 4.0])
    sparse = torch.sparse_coo_tensor(places, parts, (2, 2), check_invariants=True)
    if layout is torch.sparse_csr:
        sparse = dense.to_sparse_csr()
    clipped, norm = clip_gradients(sparse, 1.0)
    assert (norm, clipped.layout) == (5.0, layout)
    torch.testing.assert_close(clipped.to_dense(), dense / 5.0)
    torch.testing.assert_close(sparse.to_dense(), dense)


def test_graphs_views_and_conjugates_are_clipped() -> None:
    """A tensor on a graph comes back detached, a transposed or expanded or conjugate one with its values."""
    graph = torch.tensor([[3.0, 0.0], [4.0, 0.0]], requires_grad=True)
    clipped, _ = clip_gradients([graph.T, torch.zeros(1).expand(3)], 1.0)
    assert not clipped[0].requires_grad
    torch.testing.assert_close(clipped[0], graph.detach().T / 5.0)
    conjugate, _ = clip_gradients(torch.tensor([3.0 + 4.0j]).conj(), 1.0)
    torch.testing.assert_close(conjugate, torch.tensor([0.6 - 0.8j]))


def test_integers_become_float64() -> None:
    """Integers cannot hold what clipping makes of them, so they change their dtype in every case."""
    for max_norm in (1.0, 10.0):
        clipped, _ = clip_gradients([np.array([3, 4]), torch.tensor([0]), 0], max_norm)
        assert [shape_of(item) for item in clipped] == [
            (np.ndarray, np.dtype(np.float64), (1 + 1,)),
            (torch.Tensor, torch.float64, torch.Size([1])),
            (float, None, None),
        ]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_norm_is_returned_with_the_gradients_unchanged(bad: float) -> None:
    """No factor helps, so the numbers stay and the norm says what is wrong."""
    clipped, norm = clip_gradients([np.array([bad, 9.0]), 2.0], max_norm=1.0)
    np.testing.assert_equal(norm, bad)
    np.testing.assert_array_equal(flat(clipped), [bad, 9.0, 2.0])


def test_limits_of_zero_and_infinity() -> None:
    """Zero leaves nothing, infinity leaves everything."""
    assert clip_gradients([3.0, 4.0], 0.0) == ([0.0, 0.0], 5.0)
    assert clip_gradients([3.0, 4.0], math.inf) == ([3.0, 4.0], 5.0)


def test_an_iterator_becomes_a_list() -> None:
    """Gradients from a generator are taken once and come back in a list."""
    clipped: object = clip_gradients((value for value in (3.0, 4.0)), 5.0)[0]
    assert clipped == [3.0, 4.0]


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_limit_below_zero_is_an_error(max_norm: float) -> None:
    """A negative limit or NaN would turn or void the gradients."""
    with pytest.raises(UsageError, match="expected a number of at least 0"):
        clip_gradients([1.0], max_norm)


def test_a_limit_that_is_no_number_is_an_error() -> None:
    """The message names the argument."""
    with pytest.raises(InputTypeError, match="max_norm=None: expected a number"):
        clip_gradients([1.0], None)  # type: ignore[arg-type]
