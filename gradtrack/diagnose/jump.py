"""A norm or a loss that leaves what it was, which is a reason to look more closely."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

_RATE: Final = 1 / 16
_FEWEST: Final = 16
_FAR: Final = 6.0
_NORM: Final = math.log(2.0)
_LOSS: Final = 0.25
_LASTING: Final = 2
_PAUSE: Final = 64
_LONGEST: Final = 1024


class Jump:
    """Tells of steps whose norm or loss is far from the last ones', twice in a row.

    It is no fault by itself: it only makes the analyzers look, and the more often it has done so, the longer it waits
    until the next time. Far is six mean deviations, and a factor of two of the norm or a quarter of the loss.
    """

    def __init__(self) -> None:
        self.norm, self.loss = _Level(_NORM, relative=False), _Level(_LOSS, relative=True)
        self.waiting, self.pause = 0, _PAUSE

    def take(self, log_norm: float, loss: float | None) -> bool:
        """Take in a step, and say whether it is a reason to look."""
        jumped = self.norm.take(log_norm)
        if loss is not None:
            jumped = self.loss.take(loss) or jumped
        if self.waiting:
            self.waiting -= 1
            return False
        if jumped:
            self.waiting = self.pause
            self.pause = min(2 * self.pause, _LONGEST)
        return jumped

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "waiting": self.waiting,
            "pause": self.pause,
            "norm": self.norm.state_dict(),
            "loss": self.loss.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.waiting, self.pause = int(state["waiting"]), int(state["pause"])
        self.norm.load_state_dict(state["norm"])
        self.loss.load_state_dict(state["loss"])


class _Level:
    """A running mean and mean deviation, which what is far from them does not enter until it lasts."""

    def __init__(self, least: float, *, relative: bool) -> None:
        self._least, self._relative = least, relative
        self.count = self.streak = 0
        self.mean = self.spread = 0.0

    def take(self, value: float) -> bool:
        """Take in a value, and say whether it is the second in a row that is far from those before."""
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

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "streak": self.streak, "mean": self.mean, "spread": self.spread}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.streak = int(state["count"]), int(state["streak"])
        self.mean, self.spread = float(state["mean"]), float(state["spread"])
