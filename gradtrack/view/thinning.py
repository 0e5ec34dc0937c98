"""Long lines thinned out to what a screen can show, without losing a spike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Thinned:
    """A line in buckets: the step in the middle of each, its median, and its smallest and largest value."""

    steps: NDArray[Any]
    median: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @property
    def is_exact(self) -> bool:
        """Whether every bucket holds one value."""
        return self.low is self.high


def thin_out(steps: NDArray[Any], values: NDArray[np.float64], *, buckets: int) -> Thinned:
    """Cut the finite values of a line into buckets of equal count; a short line stays as it is."""
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(values) <= buckets:
        return Thinned(steps, values, values, values)
    edges = np.linspace(0, len(values), buckets + 1).astype(int)
    parts = np.split(values, edges[1:-1])
    return Thinned(
        steps[(edges[:-1] + edges[1:]) // 2],
        np.array([np.median(part) for part in parts]),
        np.array([part.min() for part in parts]),
        np.array([part.max() for part in parts]),
    )
