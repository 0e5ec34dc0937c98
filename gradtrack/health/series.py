"""Change detection in the series of losses and norms: the trend of the loss, and jumps of either."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from gradtrack.support.state import Stateful

_SIGNIFICANT: Final = 2.0
_MIN_STEPS: Final = 8


class Trend:
    """The trend of a series of losses: its end compared with its beginning, whatever their scale and sign."""

    def __init__(self, first: Sequence[float], last: Iterable[float]) -> None:
        self.losses = list(last)
        self.first = list(first)
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        self.known = len(finite) >= _MIN_STEPS
        self.diverged = len(finite) < len(self.losses)
        width = max(4, len(finite) // 4)
        self._head = [loss for loss in self.first[: max(4, min(len(self.first), width))] if math.isfinite(loss)]
        self._tail = finite[-width:]
        self.noise = _noise(finite)

    @property
    def fall(self) -> float:
        """Return how far the loss has come down, in standard errors of the difference; negative where it went up."""
        if not self.known or not self._head or self.diverged:
            return 0.0 if not self.diverged else -math.inf
        difference = statistics.fmean(self._head) - statistics.fmean(self._tail)
        error = self.noise * math.sqrt(1 / len(self._head) + 1 / len(self._tail))
        if error == 0:
            return math.copysign(math.inf, difference) if difference else 0.0
        return difference / error

    @property
    def falling(self) -> bool:
        """Whether the loss has come down by more than its noise."""
        return self.fall > _SIGNIFICANT

    @property
    def rising(self) -> bool:
        """Whether the loss has gone up by more than its noise, or is no number any more."""
        return self.fall < -_SIGNIFICANT

    @property
    def learned(self) -> bool:
        """Whether the loss has come down below where it began, whatever it did in between."""
        if not self.known or not self.first or self.diverged:
            return False
        begin, error = self.first[0], 2 * self.noise / math.sqrt(len(self._tail))
        return statistics.fmean(self._tail) < begin - max(error, 0.02 * abs(begin))

    @property
    def risen(self) -> bool:
        """Whether the loss is clearly worse than where it began, or is no number any more."""
        if self.diverged:
            return True
        if not self.known or not self.first or not self.first[0] > 0:
            return False
        begin, end = self.first[0], statistics.median(self._tail)
        return end > 1.5 * begin and sum(loss > begin for loss in self._tail) >= 0.8 * len(self._tail)

    @property
    def tells(self) -> bool:
        """Whether the loss keeps its sign, so that its going down is what training is for."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        return not finite or min(finite) >= 0 or max(finite) <= 0

    @property
    def turning(self) -> bool:
        """Whether the loss has been going up lately: the end of its last half above the beginning of it."""
        half = self.losses[-max(_MIN_STEPS, len(self.losses) // 2) :]
        return Trend(half, half).rising

    @property
    def remaining(self) -> float:
        """Return the loss at the end over that at the beginning; 1 where it is unknown or changes sign."""
        if not self.known or not self._head:
            return 1.0
        head, tail = statistics.median(self._head), statistics.median(self._tail)
        return tail / head if head > 0 and tail > 0 else 1.0


def _noise(losses: Sequence[float]) -> float:
    """Return the noise of losses: the standard deviation from step to step, robust against a trend."""
    steps = [after - before for before, after in pairwise(losses)]
    if not steps:
        return 0.0
    return 1.4826 * statistics.median(abs(step) for step in steps) / math.sqrt(2)


_RATE: Final = 1 / 16
_FEWEST: Final = 16
_FAR: Final = 6.0
_NORM: Final = math.log(2.0)
_LOSS: Final = 0.25
_LASTING: Final = 2
_PAUSE: Final = 64
_LONGEST: Final = 1024


class Jump(Stateful):
    """Detects a jump: two steps in a row whose norm or loss is far from those before.

    A jump is no issue, it only makes the analyzers run. After each jump it pauses twice as long as before. Far is six
    mean deviations, and a factor of two of the norm or a quarter of the loss.
    """

    kept_in_checkpoints = ("waiting", "pause", "norm", "loss")

    def __init__(self) -> None:
        self.norm, self.loss = _Level(_NORM, relative=False), _Level(_LOSS, relative=True)
        self.waiting, self.pause = 0, _PAUSE

    def update(self, log_norm: float, loss: float | None) -> bool:
        """Update with a step, and say whether the norm or the loss has jumped."""
        jumped = self.norm.update(log_norm)
        if loss is not None:
            jumped = self.loss.update(loss) or jumped
        if self.waiting:
            self.waiting -= 1
            return False
        if jumped:
            self.waiting = self.pause
            self.pause = min(2 * self.pause, _LONGEST)
        return jumped


class _Level(Stateful):
    """A running mean and mean deviation; a value far from them restarts both if the next one is far, too."""

    kept_in_checkpoints = ("count", "streak", "mean", "spread")

    def __init__(self, least: float, *, relative: bool) -> None:
        self._least, self._relative = least, relative
        self.count = self.streak = 0
        self.mean = self.spread = 0.0

    def update(self, value: float) -> bool:
        """Update with a value, and say whether it is the second in a row that is far from those before."""
        if not math.isfinite(value):
            return False
        away = abs(value - self.mean)
        if self.count >= _FEWEST and away > _FAR * self.spread and away > self._limit(value):
            self.streak += 1
            if self.streak >= _LASTING:
                self.count, self.streak = 0, 0
                return True
            return False
        self.streak = 0
        self.count += 1
        if self.count == 1:
            self.mean, self.spread = value, 0.0
            return False
        rate = max(_RATE, 1 / self.count)
        self.spread += rate * (away - self.spread)
        self.mean += rate * (value - self.mean)
        return False

    def _limit(self, value: float) -> float:
        return self._least * max(abs(self.mean), abs(value)) if self._relative else self._least
