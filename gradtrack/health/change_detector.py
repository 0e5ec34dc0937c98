"""The change detector: finds jumps of the norm and of the loss, on which the analyzers look at a run again."""

from __future__ import annotations

import math
from typing import Final

from gradtrack.support.state import Stateful

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
