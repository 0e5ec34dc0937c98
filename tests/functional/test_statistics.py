"""Norm and statistics against exact fractions and numpy's float64."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.errors import InputTypeError
from gradtrack.functional import compute_gradient_norm, compute_gradient_stats
from tests.functional.strategies import exact_square_sum, flat, gradients, numbers


def sparse_vector(values: list[float]) -> torch.Tensor:
    """Return nine elements, of which the first is given in two parts and the third in one."""
    indices = torch.tensor([[0, 0, 2]])
    return torch.sparse_coo_tensor(indices, torch.tensor(values), (9,), check_invariants=True)


@given(gradients)
def test_norm_of_any_nesting_is_the_root_of_the_exact_sum_of_squares(nested: object) -> None:
    """Containers, dtypes and None change nothing about the norm."""
    norm = Fraction(compute_gradient_norm(nested))
    exact = exact_square_sum(flat(nested))
    assert abs(norm * norm - exact) <= exact * Fraction(1, 10**13)


@given(gradients)
def test_stats_of_any_nesting_are_those_of_the_concatenation(nested: object) -> None:
    """Merging never averages: a nesting gives what all of its elements in one array give."""
    stats, values = compute_gradient_stats(nested), flat(nested)
    assert stats["element_count"] == values.size
    assert stats["norm"] == pytest.approx(math.sqrt(exact_square_sum(values)), rel=1e-12)
    if values.size:
        scale = float(np.abs(values).max())
        assert stats["mean"] == pytest.approx(float(values.mean()), abs=1e-12 * scale)
        assert (stats["min"], stats["max"]) == (values.min(), values.max())
    if values.size > 1:
        scale = float(np.abs(values).max())
        assert stats["std"] == pytest.approx(float(values.std(ddof=1)), rel=1e-9, abs=1e-12 * scale)


@given(st.lists(numbers, min_size=1, max_size=20), st.integers(-900, 900))
def test_a_power_of_two_passes_through_norm_and_std_exactly(values: list[float], exponent: int) -> None:
    """Numbers of 1e200 or 1e-200 are as right as ordinary ones."""
    shifted = np.ldexp(np.array(values), exponent)
    if not np.array_equal(np.ldexp(shifted, -exponent), np.array(values)):
        return  # the numbers themselves left the range
    norm, stats = compute_gradient_norm(values), compute_gradient_stats(values)
    scaled_norm, scaled_stats = compute_gradient_norm(shifted), compute_gradient_stats(shifted)
    assert scaled_norm == pytest.approx(math.ldexp(norm, exponent), rel=1e-12)
    assert scaled_stats["std"] == pytest.approx(math.ldexp(stats["std"], exponent), rel=1e-9)


def test_mixed_widths_keep_the_tiny_numbers_beside_narrow_zeros() -> None:
    """A float32 zero beside 3e-200 and 4e-200 does not hide them."""
    assert compute_gradient_norm([np.zeros(3, np.float32), 3e-200, 4e-200]) == pytest.approx(5e-200)
    assert compute_gradient_norm([np.ones(1, np.float32), 3e-200]) == 1.0


@pytest.mark.parametrize("make", [np.float16, torch.float16, torch.bfloat16])
def test_half_precision_does_not_overflow(make: type | torch.dtype) -> None:
    """Ten thousand elements of 300 have the norm 30000, though 300 squared exceeds float16."""
    array = np.full(10_000, 300.0, np.float16)
    value = torch.full((10_000,), 300.0, dtype=make) if isinstance(make, torch.dtype) else array
    assert compute_gradient_norm(value) == pytest.approx(30_000.0)
    assert compute_gradient_stats(value)["std"] == 0.0


def test_large_float32_arrays_are_summed_in_float64() -> None:
    """Three million elements keep twelve digits, over many blocks."""
    values = np.random.default_rng(0).standard_normal(3_000_000).astype(np.float32)
    wide = values.astype(np.float64)
    stats = compute_gradient_stats(values)
    assert compute_gradient_norm(values) == pytest.approx(float(np.linalg.norm(wide)), rel=1e-12)
    assert stats["norm"] == pytest.approx(float(np.linalg.norm(wide)), rel=1e-12)
    assert stats["std"] == pytest.approx(float(wide.std(ddof=1)), rel=1e-12)


def test_a_large_offset_does_not_cancel_the_deviation() -> None:
    """The deviation survives a mean that is a billion times larger."""
    values = 1e9 + np.arange(100_000) % 2
    assert compute_gradient_stats(values)["std"] == pytest.approx(float(values.std(ddof=1)), rel=1e-9)


@given(st.lists(st.sampled_from([0.0, 1e-7, -1e-7, 1.1e-7, 1.0, 999.0, 1e3, -1e3, 5e4]), min_size=1))
def test_shares_count_magnitudes_up_to_1e_7_and_from_1e3(values: list[float]) -> None:
    """Both limits belong to their share, whatever the sign."""
    stats = compute_gradient_stats(values)
    assert stats["near_zero_fraction"] == sum(abs(value) <= 1e-7 for value in values) / len(values)
    assert stats["very_large_fraction"] == sum(abs(value) >= 1e3 for value in values) / len(values)


@given(st.lists(numbers, max_size=10), st.integers(0, 3), st.integers(0, 3), st.randoms())
def test_non_finite_elements_are_counted_and_left_out(
    values: list[float], nan_count: int, inf_count: int, order: random.Random
) -> None:
    """Statistics are those of the finite elements alone, beside the two counts."""
    spoiled = [*values, *[math.nan] * nan_count, *[-math.inf] * inf_count]
    order.shuffle(spoiled)
    stats, clean = compute_gradient_stats(spoiled), compute_gradient_stats(sorted(values))
    assert (stats["nan_count"], stats["inf_count"]) == (nan_count, inf_count)
    assert stats["element_count"] == len(spoiled)
    for key in ("norm", "mean", "std", "min", "max", "near_zero_fraction", "very_large_fraction"):
        assert stats[key] == pytest.approx(clean[key], rel=1e-9, abs=1e-9, nan_ok=True)


def test_the_norm_tells_nan_and_infinity() -> None:
    """NaN wins over infinity, and both over any number."""
    assert compute_gradient_norm([1.0, -math.inf]) == math.inf
    assert compute_gradient_norm(np.array([1e300, np.inf])) == math.inf
    assert math.isnan(compute_gradient_norm([np.float32("nan"), math.inf, 1e200]))


@pytest.mark.parametrize("empty", [[], {}, None, np.zeros((0, 3)), torch.zeros(0), [None, ({},)]])
def test_nothing_has_norm_zero_and_no_extremes(empty: object) -> None:
    """Emptiness in any form is zero elements: norm and std 0, mean and extremes NaN."""
    stats = compute_gradient_stats(empty)
    assert compute_gradient_norm(empty) == stats["norm"] == stats["std"] == stats["element_count"] == 0
    assert all(math.isnan(value) for value in (stats["mean"], stats["min"], stats["max"]))


@pytest.mark.parametrize(
    "gradients",
    [
        torch.tensor([3.0, 4.0], requires_grad=True),
        torch.tensor([3.0, 4.0], requires_grad=True) * 1.0,
        torch.tensor([[3.0, 9.0], [4.0, 9.0]])[:, 0],
        sparse_vector([1.0, 2.0, 4.0]),
        torch.tensor([3.0 + 4.0j], dtype=torch.complex64).conj(),
        torch.tensor([3.0, 4.0]).to(torch.float8_e4m3fn),
        torch.tensor([3, 4]),
        np.array([3.0 + 4.0j]),
        np.array([[3.0, 0.0], [4.0, 0.0]], order="F")[:, :1],
        np.array([3.0, 4.0], dtype=">f4"),
        np.float32(5.0),
        3 + 4j,
        -5,
        {"weight": 3.0, "bias": 4.0}.values(),
        iter([3.0, None, 4.0]),
    ],
)
def test_every_kind_of_value_is_read(gradients: object) -> None:
    """Graphs, views, sparse, complex, integer and scalar values all have their norm of 5."""
    assert compute_gradient_norm(gradients) == 5.0


def test_sparse_statistics_are_over_the_coalesced_values() -> None:
    """Only the entries that exist count, and duplicate ones count as their sum."""
    stats = compute_gradient_stats(sparse_vector([1.0, 2.0, -4.0]))
    assert (stats["element_count"], stats["min"], stats["max"]) == (2, -4.0, 3.0)


@pytest.mark.parametrize(
    "gradients",
    ["3.0", b"3", [1.0, "2"], True, np.array([True]), torch.tensor([True]), object(), torch.nn.Linear(1, 1)],
)
def test_what_holds_no_numbers_is_an_error_with_a_remedy(gradients: object) -> None:
    """Text, truth values and modules are refused, and the message says what to pass."""
    with pytest.raises(InputTypeError, match=r"expected .*numbers\. Pass arrays, tensors or numbers"):
        compute_gradient_norm(gradients)
