"""Means, medians and cosines that are defined for nothing as well, and a rolling window with a cheap median."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable


def mean(values: Iterable[float]) -> float | None:
    """Return the mean, which is infinite or NaN where a value is, and None of nothing."""
    known = list(values)
    return sum(known) / len(known) if known else None


def median(values: Iterable[float]) -> float | None:
    """Return the median, and None of nothing."""
    known = list(values)
    return statistics.median(known) if known else None


def cosine(inner: float, first: float, second: float) -> float:
    """Return a cosine from the inner product of two vectors and their squares; NaN where one is zero or not finite."""
    if not (0 < first < math.inf and 0 < second < math.inf):
        return math.nan
    return max(-1.0, min(1.0, inner / math.sqrt(first) / math.sqrt(second)))


class RollingMedian:
    """A window of the last values that keeps them ordered, so that the median and its deviation are cheap."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.size = size
        self.values: deque[float] = deque(values)
        self._ordered = sorted(self.values)

    def __len__(self) -> int:
        return len(self._ordered)

    def push(self, value: float) -> None:
        """Add a value, and drop the oldest one when the window is full."""
        self.values.append(value)
        insort(self._ordered, value)
        if len(self.values) > self.size:
            del self._ordered[bisect_left(self._ordered, self.values.popleft())]

    @property
    def median(self) -> float:
        """Return the middle value; for an even number of values the mean of the two middle ones."""
        return _middle(self._ordered)

    def __getitem__(self, index: int) -> float:
        """Return the value at a rank, the smallest at 0."""
        return self._ordered[index]

    @property
    def deviation(self) -> float:
        """Return the median absolute deviation, scaled to be the standard deviation of normal values."""
        centre = self.median
        return 1.4826 * _middle(sorted(abs(value - centre) for value in self._ordered))


def _middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])
