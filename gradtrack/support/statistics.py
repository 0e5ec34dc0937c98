"""Rolling windows of numbers whose median and spread are cheap to ask for."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable


class RollingMedian:
    """The last values, with their median and their median absolute deviation."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.size = size
        self.values: deque[float] = deque(values)
        self._ordered = sorted(self.values)

    def __len__(self) -> int:
        return len(self._ordered)

    def push(self, value: float) -> None:
        """Take in a value, and forget the oldest one when the window is full."""
        self.values.append(value)
        insort(self._ordered, value)
        if len(self.values) > self.size:
            del self._ordered[bisect_left(self._ordered, self.values.popleft())]

    @property
    def median(self) -> float:
        """Return the middle value; for an even number of values the mean of the two middle ones."""
        return _middle(self._ordered)

    def __getitem__(self, index: int) -> float:
        """Return the value above which so many are smaller."""
        return self._ordered[index]

    @property
    def deviation(self) -> float:
        """Return the median absolute deviation, scaled to be the standard deviation of normal values."""
        centre = self.median
        return 1.4826 * _middle(sorted(abs(value - centre) for value in self._ordered))


def _middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])
