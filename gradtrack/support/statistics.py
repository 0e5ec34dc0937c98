"""Means, medians and cosines that are defined for nothing as well."""

from __future__ import annotations

import math
import statistics
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
