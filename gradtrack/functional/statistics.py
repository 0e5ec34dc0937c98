"""The norm and the statistics of gradients, right in float64 for every dtype and magnitude."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

import numpy as np
from numpy.typing import NDArray

from gradtrack.functional.arrays import Leaf, float64_blocks, has_wide_range, leaves

NEAR_ZERO: Final = 1e-7
VERY_LARGE: Final = 1e3
_SAFE_TO_SQUARE: Final = (1e-100, 1e100)


class GradientStats(TypedDict):
    """What `compute_gradient_stats` found; its docstring defines every entry."""

    norm: float
    mean: float
    std: float
    min: float
    max: float
    near_zero_fraction: float
    very_large_fraction: float
    element_count: int
    nan_count: int
    inf_count: int


def compute_gradient_norm(gradients: object) -> float:
    """Return the L2 norm of all elements together.

    Of several arrays it is the root of the summed squares. A NaN anywhere gives NaN, otherwise an infinity
    gives infinity. None counts as no gradient, the norm of nothing is 0.0. Complex elements enter by their
    magnitude, a sparse tensor by its coalesced values.

    >>> compute_gradient_norm([3.0, [4.0, None], {"bias": 12.0}])
    13.0
    """
    return norm_of(list(leaves(gradients)))


def norm_of(arrays: Sequence[Leaf]) -> float:
    """Return the L2 norm over arrays that are already unpacked."""
    scale = _common_scale(arrays)
    with np.errstate(all="ignore"):
        squares = [float(np.dot(x, x)) for array in arrays for x in _scaled_blocks(array, scale)]
    return math.sqrt(math.fsum(squares)) * scale


def compute_gradient_stats(gradients: object) -> GradientStats:
    """Return the statistics of all elements together, over the finite ones.

    - `norm`, `mean`, `min`, `max`: as they say; mean, min and max are NaN where no element is finite.
    - `std`: the root of the unbiased sample variance (division by n - 1), and 0.0 under two elements.
    - `near_zero_fraction`, `very_large_fraction`: the share, from 0 to 1, of elements with a magnitude of at
      most 1e-7, and of at least 1e3; 0.0 where no element is finite.
    - `element_count`: all elements, finite or not; `nan_count` and `inf_count`: those that are not.

    Several arrays are merged exactly: the result is that of their concatenation. Complex elements enter by
    their magnitude, a sparse tensor by its coalesced values, and None not at all.
    """
    arrays = list(leaves(gradients))
    moments = _Moments(scale=_common_scale(arrays))
    with np.errstate(all="ignore"):
        for array in arrays:
            for block in float64_blocks(array):
                moments.add(block)
    return moments.stats()


def _common_scale(arrays: Sequence[Leaf]) -> float:
    """Return the power of two to divide by so that squares neither overflow nor vanish; mostly 1."""
    wide = [array for array in arrays if has_wide_range(array)]
    peak = _peak(wide)
    if 0.0 < peak < _SAFE_TO_SQUARE[0]:
        peak = _peak(arrays)  # beside any number of a narrower dtype these are nothing
    if peak == 0.0 or _SAFE_TO_SQUARE[0] < peak < _SAFE_TO_SQUARE[1]:
        return 1.0
    return math.ldexp(1.0, math.frexp(peak)[1] - 1)


def _peak(arrays: Sequence[Leaf]) -> float:
    magnitudes = (np.abs(block) for array in arrays for block in float64_blocks(array))
    return max((float(np.max(m, where=np.isfinite(m), initial=0.0)) for m in magnitudes), default=0.0)


def _scaled_blocks(array: Leaf, scale: float) -> list[NDArray[np.float64]]:
    return [block if scale == 1.0 else block / scale for block in float64_blocks(array)]


@dataclass(slots=True)
class _Moments:
    """Count, mean and squared deviations that take in one block after the other (Chan's merge)."""

    scale: float
    finite_count: int = 0
    mean: float = 0.0
    squared_deviations: float = 0.0
    squares: float = 0.0
    min: float = math.nan
    max: float = math.nan
    near_zero_count: int = 0
    very_large_count: int = 0
    nan_count: int = 0
    inf_count: int = 0

    def add(self, block: NDArray[np.float64]) -> None:
        finite_mask = np.isfinite(block)
        finite = block if finite_mask.all() else block[finite_mask]
        if finite.size < block.size:
            nan_count = int(np.count_nonzero(np.isnan(block)))
            self.nan_count += nan_count
            self.inf_count += block.size - finite.size - nan_count
        if finite.size == 0:
            return
        magnitudes = np.abs(finite)
        self.near_zero_count += int(np.count_nonzero(magnitudes <= NEAR_ZERO))
        self.very_large_count += int(np.count_nonzero(magnitudes >= VERY_LARGE))
        self.min = float(np.fmin(self.min, finite.min()))
        self.max = float(np.fmax(self.max, finite.max()))
        self._merge(finite if self.scale == 1.0 else finite / self.scale)

    def _merge(self, values: NDArray[np.float64]) -> None:
        mean = float(values.mean())
        deviations = values - mean
        total = self.finite_count + values.size
        gap = mean - self.mean
        self.squared_deviations += float(np.dot(deviations, deviations))
        self.squared_deviations += gap * gap * (self.finite_count * values.size / total)
        self.mean += gap * (values.size / total)
        self.squares += float(np.dot(values, values))
        self.finite_count = total

    def stats(self) -> GradientStats:
        count = self.finite_count
        variance = self.squared_deviations / (count - 1) if count > 1 else 0.0
        return GradientStats(
            norm=math.sqrt(self.squares) * self.scale,
            mean=self.mean * self.scale if count else math.nan,
            std=math.sqrt(variance) * self.scale,
            min=self.min,
            max=self.max,
            near_zero_fraction=self.near_zero_count / max(count, 1),
            very_large_fraction=self.very_large_count / max(count, 1),
            element_count=count + self.nan_count + self.inf_count,
            nan_count=self.nan_count,
            inf_count=self.inf_count,
        )
