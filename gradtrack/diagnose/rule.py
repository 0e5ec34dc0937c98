"""The interface of a rule."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gradtrack.config import GradientConfig
from gradtrack.diagnose.evidence import CalmStep, Evidence
from gradtrack.diagnose.window import RollingMedian
from gradtrack.reports import Issue

Band = tuple[float, float]
"""What lies above its first and below its second number."""
ANY: Final[Band] = (-math.inf, math.inf)
TENFOLD: Final = math.log(10.0)
MOST_WAITING: Final = 16
"""How many steps are judged together at most."""
SLACK: Final = 1e-6
"""By how much a band is narrower than the rule has it, so that no rounding decides."""


class Rule(ABC):
    """One kind of finding, judged from a window of evidence that the rule keeps itself.

    A rule is one file with one class. Its attributes are numbers, lists, deques and rolling medians, so that it can be
    saved with a checkpoint.
    """

    @abstractmethod
    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        """Take in the evidence of one step and return the issues that are open now."""

    def calm(self, config: GradientConfig) -> Band | None:
        """Return between which ln of the norm a step opens nothing, nor do those after it, `MOST_WAITING` in all.

        That is of steps with gradients, whose numbers are finite, of which clipping leaves more than `LEAST_LEFT`, and
        whose norm is neither ten times that of the step before nor a tenth. Return None where every step has to be
        judged at once.
        """
        return None

    def take_in(self, steps: Sequence[CalmStep]) -> None:
        """Remember of steps what `judge` would have remembered; they were within what `calm` returned."""

    def state_dict(self) -> dict[str, Any]:
        """Return the window, as plain data."""
        return {name: _plain(value) for name, value in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, _like(getattr(self, name), value))


def _plain(value: Any) -> Any:
    if isinstance(value, RollingMedian):
        return list(value.values)
    return list(value) if isinstance(value, (deque, list)) else value


def _like(present: Any, saved: Any) -> Any:
    if isinstance(present, RollingMedian):
        return RollingMedian(present.size, saved)
    if isinstance(present, deque):
        return deque(saved, maxlen=present.maxlen)
    return list(saved) if isinstance(saved, list) else saved
