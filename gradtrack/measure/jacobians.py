"""The size and the conditioning of the Jacobian of a module at one input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from gradtrack.measure.linear_maps import (
    LinearMap,
    largest_singular_value,
    leading_singular_values,
    squared_frobenius,
)
from gradtrack.measure.spectra import arnoldi_radius, condition_number, effective_rank, spectral_radius

EXACT_LIMIT: Final = 512
_CAP: Final = 16.0


class JacobianNumbers(NamedTuple):
    """What a Jacobian J with `num_outputs` rows does to gradients; None where a matrix-free look cannot tell.

    `mean_square_gain` is ‖J‖²/num_outputs, by which the squared norm of a random gradient changes on its way back.
    """

    num_inputs: int
    num_outputs: int
    exact: bool
    sigma_max: float
    sigma_min: float | None
    condition: float | None
    effective_rank: float
    mean_square_gain: float
    mean_square_gain_error: float
    spectral_radius: float | None


def measure_jacobian(
    function: Callable[[Tensor], Tensor],
    at: Tensor,
    generator: torch.Generator,
    *,
    exact_limit: int = EXACT_LIMIT,
    num_probes: int = 16,
    num_values: int = 32,
) -> JacobianNumbers:
    """Measure the Jacobian of a function: all of it up to a limit on the smaller side, by products beyond."""
    linear = LinearMap.of(function, at)
    if min(linear.num_inputs, linear.num_outputs) <= exact_limit:
        return _from_matrix(linear)
    return _from_products(linear, generator, num_probes, num_values)


def log10_condition(condition: float | None) -> float | None:
    """Return the order of magnitude of a condition number, at most 16."""
    return None if condition is None or math.isnan(condition) else min(math.log10(condition), _CAP)


def _from_matrix(linear: LinearMap) -> JacobianNumbers:
    matrix = linear.matrix().double()
    square = linear.num_inputs == linear.num_outputs
    if not torch.isfinite(matrix).all():
        return JacobianNumbers(
            linear.num_inputs, linear.num_outputs, True, math.nan, math.nan, math.nan, math.nan, math.nan, 0.0, None
        )
    values = torch.linalg.svdvals(matrix)
    return JacobianNumbers(
        num_inputs=linear.num_inputs,
        num_outputs=linear.num_outputs,
        exact=True,
        sigma_max=float(values.max()),
        sigma_min=float(values.min()),
        condition=condition_number(values),
        effective_rank=effective_rank(values),
        mean_square_gain=float(values.square().sum()) / linear.num_outputs,
        mean_square_gain_error=0.0,
        spectral_radius=spectral_radius(matrix) if square else None,
    )


def _from_products(linear: LinearMap, generator: torch.Generator, num_probes: int, num_values: int) -> JacobianNumbers:
    squares, error = squared_frobenius(linear, generator, num_probes=num_probes)
    values = leading_singular_values(linear, generator, count=num_values)
    sigma_max = max(largest_singular_value(linear, generator), float(values.max()))
    smaller = min(linear.num_inputs, linear.num_outputs)
    square = linear.num_inputs == linear.num_outputs
    start = linear.random(linear.num_outputs, generator)
    return JacobianNumbers(
        num_inputs=linear.num_inputs,
        num_outputs=linear.num_outputs,
        exact=False,
        sigma_max=sigma_max,
        sigma_min=None,
        condition=None,
        effective_rank=_completed_rank(values, squares, smaller),
        mean_square_gain=squares / linear.num_outputs,
        mean_square_gain_error=error / linear.num_outputs,
        spectral_radius=arnoldi_radius(linear.pull, start) if square else None,
    )


def _completed_rank(values: Tensor, squares: float, count: int) -> float:
    """Return the effective rank with what the leading values leave of the squares spread evenly over all others."""
    left = max(squares - float(values.square().sum()), 0.0)
    others = count - len(values)
    if others <= 0 or left <= 0:
        return effective_rank(values)
    rest = min(math.sqrt(left / others), float(values.min()))
    return effective_rank(torch.cat([values, values.new_full((others,), rest)]))
