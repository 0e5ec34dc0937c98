"""The gain per block that mean-field theory gives a wide random network at its initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from numpy.typing import NDArray

Function = Callable[[NDArray[np.float64]], NDArray[np.float64]]
_POINTS: Final = 200
_NODES, _WEIGHTS = hermegauss(_POINTS)


def tanh(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the hyperbolic tangent."""
    return np.tanh(z)


def tanh_slope(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the derivative of the hyperbolic tangent."""
    return 1.0 - np.tanh(z) ** 2


def expectation(function: Function, variance: float) -> float:
    """Return the mean of a function of a Gaussian with mean zero."""
    values = function(math.sqrt(variance) * _NODES)
    return float(_WEIGHTS @ values / math.sqrt(2 * math.pi))


def fixed_point(weight_std: float, bias_std: float = 0.0, activation: Function = tanh) -> float:
    """Return the variance of the pre-activations that a deep network settles at, from q = σ_w² E[φ(√q z)²] + σ_b²."""
    variance = 1.0
    for _ in range(10_000):
        following = weight_std**2 * expectation(lambda z: activation(z) ** 2, variance) + bias_std**2
        if abs(following - variance) < 1e-14:
            return following
        variance = following
    return variance


def squared_gain(
    weight_std: float, bias_std: float = 0.0, activation: Function = tanh, slope: Function = tanh_slope
) -> float:
    """Return χ₁ = σ_w² E[φ'(√q z)²], the mean squared backward gain per layer (Schoenholz et al. 2017)."""
    variance = fixed_point(weight_std, bias_std, activation)
    return weight_std**2 * expectation(lambda z: slope(z) ** 2, variance)


def depth_scale(weight_std: float, bias_std: float = 0.0) -> float:
    """Return the number of layers 1/|ln χ₁| over which the squared norm of a gradient changes by a factor of e."""
    logarithm = abs(math.log(squared_gain(weight_std, bias_std)))
    return math.inf if logarithm == 0 else 1 / logarithm
