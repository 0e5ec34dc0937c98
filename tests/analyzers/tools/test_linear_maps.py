"""Products with a Jacobian and what follows from them, against matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradtrack.analyzers.jacobian.report import measure_jacobian
from gradtrack.analyzers.tools.linear_maps import (
    LinearMap,
    differentiable_twice,
    largest_singular_value,
    leading_singular_values,
    squared_frobenius,
)


def generator(seed: int = 0) -> torch.Generator:
    """Return a generator of its own."""
    return torch.Generator().manual_seed(seed)


def random_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return a random matrix."""
    return torch.randn(rows, columns, generator=generator(seed), dtype=torch.float64)


def curved(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function whose Jacobian depends on the point."""
    return lambda x: torch.tanh(matrix @ x) + (matrix @ x) ** 2


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_the_matrix_is_that_of_torch(rows: int, columns: int, seed: int) -> None:
    """By rows and by columns J is what `torch.func.jacrev` gives, and both products agree with it."""
    function, at = curved(random_matrix(rows, columns, seed)), random_matrix(columns, 1, seed + 1)[:, 0]
    expected: Tensor = torch.func.jacrev(function)(at)
    linear = LinearMap.of(function, at)
    torch.testing.assert_close(linear.matrix(), expected, rtol=1e-10, atol=1e-10)
    u, v = random_matrix(columns, 1, 7)[:, 0], random_matrix(rows, 1, 8)[:, 0]
    torch.testing.assert_close(linear.push(u), expected @ u, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(linear.pull(v), expected.T @ v, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (50, 50)])
def test_the_largest_singular_value_is_that_of_the_matrix(shape: tuple[int, int]) -> None:
    """Bidiagonalisation finds it to 1e-3, for wide, tall and square matrices."""
    matrix = random_matrix(*shape)
    linear = LinearMap.of(lambda x: matrix @ x, torch.zeros(shape[1], dtype=torch.float64))
    exact = float(torch.linalg.svdvals(matrix)[0])
    assert largest_singular_value(linear, generator()).value() == pytest.approx(exact, rel=1e-3)


def test_the_frobenius_norm_comes_with_its_error() -> None:
    """The squared norm lies within four standard errors, and is exact for orthogonal rows."""
    matrix = random_matrix(60, 80)
    linear = LinearMap.of(lambda x: matrix @ x, torch.zeros(80, dtype=torch.float64))
    found, error = squared_frobenius(linear, generator(), num_probes=64).value()
    assert abs(found - float(matrix.square().sum())) < 4 * error
    identity = LinearMap.of(lambda x: 2 * x, torch.zeros(9, dtype=torch.float64))
    assert squared_frobenius(identity, generator(), num_probes=1).value()[0] == pytest.approx(36)


def test_the_leading_singular_values_of_a_decaying_spectrum_are_found() -> None:
    """A range finder of twenty vectors gives the first ten values."""
    left, right = (torch.linalg.qr(random_matrix(100, 100, seed))[0] for seed in (1, 2))
    values = 0.6 ** torch.arange(100, dtype=torch.float64)
    matrix = left @ values.diag() @ right
    linear = LinearMap.of(lambda x: matrix @ x, torch.zeros(100, dtype=torch.float64))
    torch.testing.assert_close(
        leading_singular_values(linear, generator(), count=20).value()[:10], values[:10], rtol=1e-2, atol=0.0
    )


@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_matrix_free_numbers_agree_with_exact_ones(decay: float) -> None:
    """Beyond the limit, size and rank agree with the matrix for flat and decaying spectra; the unknown is None."""
    left, right = (torch.linalg.qr(random_matrix(120, 120, seed))[0] for seed in (1, 2))
    matrix = left @ (decay ** torch.arange(120, dtype=torch.float64)).diag() @ right
    at = torch.zeros(120, dtype=torch.float64)
    exact = measure_jacobian(lambda x: matrix @ x, at, generator()).value()
    free = measure_jacobian(lambda x: matrix @ x, at, generator(), exact_limit=50).value()
    assert (exact.exact, free.exact) == (True, False)
    assert (free.sigma_min, free.condition) == (None, None)
    assert free.spectral_radius == pytest.approx(exact.spectral_radius, rel=0.02)
    assert free.sigma_max == pytest.approx(exact.sigma_max, rel=1e-3)
    assert free.effective_rank == pytest.approx(exact.effective_rank, rel=0.1)
    assert abs(free.mean_square_gain - exact.mean_square_gain) <= 4 * free.mean_square_gain_error + 1e-12


def test_a_function_that_does_not_depend_on_its_input_has_the_zero_map() -> None:
    """Its products are zero and its condition is infinite."""
    at = torch.ones(3, dtype=torch.float64)
    linear = LinearMap.of(lambda x: torch.ones(2, dtype=torch.float64), at)
    assert torch.equal(linear.matrix(), torch.zeros(2, 3, dtype=torch.float64))
    assert torch.equal(linear.push(at), torch.zeros(2, dtype=torch.float64))
    assert measure_jacobian(lambda x: x * 0, at, generator()).value().condition == math.inf


@pytest.mark.parametrize(
    "module",
    [
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        nn.LSTM(8, 8, batch_first=True),
        nn.GRU(8, 8, batch_first=True),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)),
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()),
    ],
)
def test_layers_can_be_differentiated_twice(module: Any) -> None:
    """Both products work for attention, recurrent layers and in-place activations, and are those of differences."""
    module = module.double().eval()

    def run(x: Tensor) -> Tensor:
        output = module(x)
        return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]

    at, step = random_matrix(5, 8).reshape(1, 5, 8), random_matrix(5, 8, 1).reshape(1, 5, 8)
    with differentiable_twice(module):
        linear = LinearMap.of(run, at)
        pushed = linear.push(step.reshape(-1))
        with torch.no_grad():
            difference = (run(at + 1e-6 * step) - run(at - 1e-6 * step)).reshape(-1) / 2e-6
        torch.testing.assert_close(pushed, difference, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(linear.matrix() @ step.reshape(-1), pushed, rtol=1e-9, atol=1e-9)
