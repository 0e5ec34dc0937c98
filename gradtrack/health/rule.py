"""The interface of the rules that judge each step, the evidence that they are given, and limits that users choose."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

from gradtrack.config import GradientConfig
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.moments import Moments, log_norm
from gradtrack.reports import Issue, IssueSeverity, IssueType
from gradtrack.support.statistics import RollingMedian

LEAST_LEFT: Final = 0.01
"""What clipping leaves of a norm that is judged at once, since it may decide too many steps."""


class CalmStep(NamedTuple):
    """What rules remember of a step on which nothing can open."""

    log_norm: float
    loss: float | None
    limit: float | None
    """The limit of the norm, where somebody chose it."""
    clipped: bool


@dataclass(slots=True, kw_only=True)
class Evidence:
    """One step as the rules see it: its norm, its loss, its clipping, and the sums of every tensor."""

    step: int
    norm: float
    moments: Moments
    layout: Layout
    loss: float | None = None
    clipped: bool = False
    clip_threshold: float | None = None
    nonfinite_action: str = "none"
    critical: bool = False
    log_norm: float = field(init=False)
    """ln of the norm: -inf for a norm of zero, NaN for one that is not finite."""

    def __post_init__(self) -> None:
        self.log_norm = log_norm(self.norm)


def has_chosen_limit(config: GradientConfig) -> bool:
    """Say whether norms are limited, and by a limit that somebody chose."""
    return "max_grad_norm" in config.model_fields_set and config.effective_clip_type not in ("value", "agc")


def beyond_limit(evidence: Evidence, kind: IssueType, limit: float | None) -> list[Issue]:
    """Return the issue of a norm above `exploding_threshold`, or below `vanishing_threshold`."""
    large = kind is IssueType.EXPLODING
    if limit is None or not (evidence.norm > limit if large else evidence.norm < limit):
        return []
    name = "exploding_threshold" if large else "vanishing_threshold"
    remedy = "Reduce the learning rate or clip" if large else "Look for saturated units or raise the learning rate"
    return [
        Issue(
            issue_type=kind,
            severity=IssueSeverity.HIGH,
            message=f"The gradient norm {evidence.norm:.3g} is {'above' if large else 'below'} {name}={limit:g}.",
            statistic="norm",
            value=evidence.norm,
            threshold=limit,
            step=evidence.step,
            recommendation=f"{remedy}; a limit in absolute terms moves with the loss scale.",
        )
    ]


Band = tuple[float, float]
"""What lies above its first and below its second number."""
ANY: Final[Band] = (-math.inf, math.inf)
TENFOLD: Final = math.log(10.0)
MOST_TOGETHER: Final = 16
"""How many steps are remembered together at most."""
SLACK: Final = 1e-6
"""By how much a band is narrower than the rule has it, so that no rounding decides."""


class Rule(ABC):
    """One kind of finding, judged from a window of evidence that the rule keeps itself.

    A rule is one file with one class. What it remembers are numbers, lists, deques and rolling medians, so that it can
    be saved with a checkpoint.
    """

    kept_in_checkpoints: ClassVar[tuple[str, ...]]
    """The attributes that a checkpoint keeps, under the same names."""

    @abstractmethod
    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        """Take in the evidence of one step and return the issues that are open now."""

    def calm(self, config: GradientConfig) -> Band | None:
        """Return between which ln of the norm a step opens nothing, nor do those after it, `MOST_TOGETHER` in all.

        That is of steps with gradients, whose numbers are finite, of which clipping leaves more than `LEAST_LEFT`, and
        whose norm is neither ten times that of the step before nor a tenth. Return None where every step has to be
        judged at once.
        """
        return None

    def remember(self, steps: Sequence[CalmStep]) -> None:
        """Remember of steps what `judge` would have remembered; they were within what `calm` returned."""

    def state_dict(self) -> dict[str, Any]:
        """Return the window, as plain data."""
        return {name: _plain(getattr(self, name)) for name in self.kept_in_checkpoints}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        for name in self.kept_in_checkpoints:
            if name in state:
                setattr(self, name, _like(getattr(self, name), state[name]))


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
