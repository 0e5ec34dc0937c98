"""The interface of a rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any

from gradtrack.config import GradientConfig
from gradtrack.diagnose.evidence import Evidence
from gradtrack.diagnose.window import RollingMedian
from gradtrack.reports import Issue


class Rule(ABC):
    """One kind of finding, judged from a window of evidence that the rule keeps itself.

    A rule is one file with one class. Its attributes are numbers, lists, deques and rolling medians, so that it can be
    saved with a checkpoint.
    """

    @abstractmethod
    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        """Take in the evidence of one step and return the issues that are open now."""

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
