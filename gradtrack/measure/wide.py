"""Sums of squares of float64 gradients, which leave the range of a float64, in two numbers that can be added up."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gradtrack.measure.moments import MAX, MIN, SQUARES, SUM, Rows

_BORDER: Final = 48
_LOW: Final = 945
_HIGH: Final = -1070
_HEADROOM: Final = 64
_SAFE: Final = 900
"""Powers of two: squares up to the border are multiplied by one, those above it by another, so that neither leaves the
range when those of many ranks are added; the sums are divided by the headroom for the same reason."""


def is_wide(param: nn.Parameter) -> bool:
    """Say whether the squares of a gradient can leave the range of a float64."""
    kinds = (param.dtype, getattr(param, "grad_dtype", param.dtype))  # the second is None where any will do
    return not {torch.float64, torch.complex128, None}.isdisjoint(kinds)


def split(rows: Rows, exponent: int) -> tuple[Rows, Rows]:
    """Return rows with the squares up to the border, and those above it; `exponent` is that of the rows."""
    mantissas, powers = np.frexp(rows[:, SQUARES])
    powers = powers + 2 * exponent
    is_high, found = powers > _BORDER, rows.copy()
    found[:, SUM] = np.ldexp(rows[:, SUM], exponent - _HEADROOM)
    found[:, SQUARES] = np.where(is_high, 0.0, np.ldexp(mantissas, np.minimum(powers, _BORDER) + _LOW))
    return found, np.where(is_high, np.ldexp(mantissas, powers + _HIGH), 0.0)[:, None]


def join(rows: Rows, high: NDArray[np.float64], largest: float = 0.0) -> int:
    """Put squares together again that were split, in place; return the exponent of the rows from then on.

    With it the squares of `largest` are in the range as well.
    """
    low = rows[:, SQUARES]
    powers = [int(np.frexp(part.sum())[1]) - moved for part, moved in ((low, _LOW), (high, _HIGH)) if part.any()]
    power = max(powers + [2 * math.frexp(largest)[1]] * (largest > 0), default=0)
    exponent = 0 if abs(power) < _SAFE else power // 2
    rows[:, SQUARES] = np.ldexp(low, -_LOW - 2 * exponent) + np.ldexp(high, -_HIGH - 2 * exponent)
    rows[:, SUM] = np.ldexp(rows[:, SUM], _HEADROOM - exponent)
    for end in (MIN, MAX):
        rows[:, end] = np.ldexp(rows[:, end], -exponent)
    return exponent
