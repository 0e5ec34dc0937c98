"""Clipping strategies: the limit of the norm, fixed or computed from the norms of the steps before."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from gradtrack.config import GradientConfig
from gradtrack.support.state import Stateful

WARMUP: Final = 10
"""How many norms must be known before a strategy judges by them; `max_grad_norm` applies until then."""

ClippedNorm = tuple[float, float]
"""The norm of a step before and after clipping."""


class Memory(NamedTuple):
    """The settings of a step that say how long its norm is remembered."""

    window_size: int
    alpha: float

    @classmethod
    def of(cls, config: GradientConfig) -> Memory:
        """Return the settings of a configuration as they are now."""
        return cls(config.adaptive_window_size, config.zscore_alpha)


class Strategy(Stateful, ABC):
    """A clipping strategy: computes the limit of the next step's norm from finite norms."""

    kept_in_checkpoints: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def threshold(self, config: GradientConfig) -> float:
        """Return the limit of the norm for the current step."""

    def observe(self, norms: Sequence[ClippedNorm], memory: Memory) -> None:
        """Remember the finite norms of steps before and after clipping."""


class FixedStrategy(Strategy):
    """The limit `max_grad_norm` of the configuration."""

    def threshold(self, config: GradientConfig) -> float:
        return config.max_grad_norm


class AdaptiveStrategy(Strategy):
    """A percentile of the recent norms before clipping, as `numpy.percentile` has it, without the current one.

    The norms are kept sorted from the first time on that the clipper asks for the percentile.
    """

    kept_in_checkpoints = ("_recent", "_seen")

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] | None = None
        self._seen = 0

    def threshold(self, config: GradientConfig) -> float:
        if self._seen < WARMUP:
            return config.max_grad_norm
        if len(self._recent) > config.adaptive_window_size:
            self._change((), config.adaptive_window_size)
        if self._sorted is None:
            self._sorted = sorted(self._recent)
        return percentile(self._sorted, config.adaptive_percentile) or config.max_grad_norm

    def observe(self, norms: Sequence[ClippedNorm], memory: Memory) -> None:
        self._change([norm for norm, _ in norms], memory.window_size)
        self._seen += len(norms)

    def _change(self, added: Sequence[float], size: int) -> None:
        """Add norms and drop the oldest beyond a size."""
        ordered, recent = self._sorted, self._recent
        self._sorted = None  # an exception within leaves the norms to be sorted anew
        recent.extend(added)
        oldest = [recent.popleft() for _ in range(len(recent) - size)]
        if ordered is not None:
            for norm in added:
                insort(ordered, norm)
            for norm in oldest:
                del ordered[bisect_left(ordered, norm)]
            self._sorted = ordered

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._sorted = None


class ZScoreStrategy(Strategy):
    """A number of standard deviations above the running mean of the norms, in which spikes count as clipped.

    Mean and variance are exponential moving averages (arXiv 2504.02507 has the idea for pre-training spikes).
    """

    kept_in_checkpoints = ("_mean", "_variance", "_seen")

    def __init__(self) -> None:
        self._mean = 0.0
        self._variance = 0.0
        self._seen = 0

    def threshold(self, config: GradientConfig) -> float:
        if self._seen < WARMUP:
            return config.max_grad_norm
        return self._mean + config.zscore_threshold * math.sqrt(self._variance) or config.max_grad_norm

    def observe(self, norms: Sequence[ClippedNorm], memory: Memory) -> None:
        mean, variance, seen, least = self._mean, self._variance, self._seen, 1.0 - memory.alpha
        for norm, clipped_norm in norms:
            value, seen = norm if seen < WARMUP else clipped_norm, seen + 1
            # While few norms are known the weight of each is 1/n, so that the first one does not own the average.
            weight = max(least, 1.0 / seen)
            change = value - mean
            mean, variance = mean + weight * change, (1.0 - weight) * (variance + weight * change * change)
        self._mean, self._variance, self._seen = mean, variance, seen  # together, whatever interrupts


def percentile(ordered: list[float], percent: float) -> float:
    """Return a percentile of ascending values, bit for bit as `numpy.percentile` interpolates it."""
    position = percent / 100.0 * (len(ordered) - 1)
    index = min(int(position), len(ordered) - 1)
    low, high = ordered[index], ordered[min(index + 1, len(ordered) - 1)]
    share, gap = position - index, high - low
    return low + gap * share if share < 0.5 else high - gap * (1.0 - share)
