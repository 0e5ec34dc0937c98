"""Random gradients, and their statistics by another way."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0)


@st.composite
def tensors(draw: st.DrawFn, *, special: bool = True, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Tensor:
    """Draw a small tensor of any floating type, shape and scale, with special values here and there."""
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    seed = draw(st.integers(0, 2**16))
    scale = 2.0 ** draw(st.integers(-12, 12))
    offset = draw(st.sampled_from([0.0, 0.0, 3.0, 1000.0]))
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(shape, generator=generator, dtype=torch.float64) + offset) * scale
    flat = values.view(-1)
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)) if special else []:
        if flat.numel():
            flat[draw(st.integers(0, flat.numel() - 1))] = value
    dtype = draw(st.sampled_from(dtypes))
    limit = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-limit, limit), values).to(dtype)


@st.composite
def gradients(draw: st.DrawFn, *, special: bool = True) -> list[Tensor]:
    """Draw the gradients of a model."""
    return draw(st.lists(tensors(special=special), min_size=1, max_size=5))


def oracle(values: list[float]) -> dict[str, Any]:
    """Return the statistics of numbers by exact rational arithmetic over the finite ones."""
    finite = [Fraction(value) for value in values if math.isfinite(value)]
    count = len(finite)
    total, squares = sum(finite), sum(value * value for value in finite)
    mean = total / count if count else None
    spread = sum((value - mean) ** 2 for value in finite) if mean is not None else Fraction(0)
    return {
        "norm": _root(Fraction(squares)),
        "mean": float(mean) if mean is not None else math.nan,
        "variance": float(spread / (count - 1)) if count > 1 else 0.0,
        "min": float(min(finite)) if count else math.nan,
        "max": float(max(finite)) if count else math.nan,
        "zero_fraction": sum(value == 0 for value in values) / len(values) if values else 0.0,
        "element_count": len(values),
        "nan_count": sum(math.isnan(value) for value in values),
        "inf_count": sum(math.isinf(value) for value in values),
    }


def same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> bool:
    """Compare statistics, the mean and the variance relative to the size of the elements."""
    size = abs(expected["norm"]) / max(1, expected["element_count"]) ** 0.5
    scales = {"mean": size, "variance": size * size}
    return all(
        _close(found[name], value, tolerance, scales.get(name, 0.0))
        if isinstance(value, float)
        else found[name] == value
        for name, value in expected.items()
    )


def _close(found: float, expected: float, tolerance: float, scale: float) -> bool:
    if math.isnan(expected):
        return math.isnan(found)
    return math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance * scale)


def flat(grads: list[Tensor]) -> list[float]:
    """Return all elements as Python floats."""
    return [float(value) for grad in grads for value in np.ravel(grad.detach().double().numpy())]


def _root(value: Fraction) -> float:
    try:
        return math.sqrt(value)
    except OverflowError:
        shift = 2 * (value.numerator.bit_length() // 2)
        return math.ldexp(math.sqrt(value / 2**shift), shift // 2)
