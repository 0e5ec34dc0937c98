"""The interface of a health rule, the evidence of a step that rules judge, and the limits that users set."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

from gradtrack.config import GradientConfig
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.moments import Moments, log_norm
from gradtrack.reports import Issue, IssueType
from gradtrack.support.state import Stateful

LEAST_LEFT: Final = 0.01
"""A step of which clipping leaves less than this share of the norm is judged at once, see `ClipSaturatedRule`."""


class CalmSteps(NamedTuple):
    """Steps on which no issue can open, the oldest first: the numbers of each that rules remember."""

    log_norms: Sequence[float]
    losses: Sequence[float | None]
    limits: Sequence[float | None]
    """The limits of the norm, if the user has set one."""
    clipped: Sequence[bool]


@dataclass(slots=True, kw_only=True)
class Evidence:
    """The evidence of one step for the rules: its norm, loss, clipping, and the sums of every tensor."""

    step: int
    norm: float
    moments: Moments
    layout: Layout
    loss: float | None = None
    clipped: bool = False
    left_out: bool = False
    """Whether the step is left out as a spike."""
    clip_threshold: float | None = None
    nonfinite_action: str = "none"
    critical: bool = False
    weights: Mapping[str, float] | None = None
    """The norm of each group's weights before the update, known where a row is due."""
    version: int = 0
    """A count of the changes of the weights in place, known with them."""
    rate: float = 0.0
    """The largest learning rate of the coming update, known with the weights; 0 if the step is skipped."""
    batch: object = None
    """What the loop has passed as the batch of the step."""
    log_norm: float = field(init=False)
    """ln of the norm: -inf for a norm of zero, NaN for one that is not finite."""

    def __post_init__(self) -> None:
        self.log_norm = log_norm(self.norm)


def has_chosen_limit(config: GradientConfig) -> bool:
    """Say whether the norm of all gradients is limited, and by a limit that the user has set."""
    if config.limits_groups:
        return False
    return "max_grad_norm" in config.model_fields_set and config.effective_clip_type not in ("value", "agc")


Band = tuple[float, float]
"""A band of ln of the norm: its lower and its upper bound."""
ANY: Final[Band] = (-math.inf, math.inf)
TENFOLD: Final = math.log(10.0)
MOST_TOGETHER: Final = 16
"""How many steps are remembered together at most."""
SLACK: Final = 1e-6
"""How much narrower a band is than the rule's own bounds, so that rounding cannot open an issue."""


class RollingMedian:
    """A window of the last values that keeps them ordered, so that the median and its deviation are cheap."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.size = size
        self.values: deque[float] = deque(values)
        self._ordered = sorted(self.values)

    def __len__(self) -> int:
        return len(self._ordered)

    def extend(self, values: Sequence[float]) -> None:
        """Add values, and drop the oldest ones when the window is full."""
        self.values.extend(values)
        for _ in range(len(self.values) - self.size):
            self.values.popleft()
        self._ordered = sorted(self.values)

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

    def state_dict(self) -> list[float]:
        """Return the values, oldest first."""
        return list(self.values)

    def load_state_dict(self, values: Iterable[float]) -> None:
        """Restore what `state_dict` returned."""
        self.__init__(self.size, values)  # type: ignore[misc]

    @property
    def deviation(self) -> float:
        """Return the median absolute deviation, scaled to be the standard deviation of normal values."""
        centre = self.median
        return 1.4826 * _middle(sorted(abs(value - centre) for value in self._ordered))


def _middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])


class Rule(Stateful, ABC):
    """A health rule: finds issues of one kind from a window of evidence that the rule keeps itself.

    Its state is made of numbers, lists, deques and rolling medians, so that a checkpoint can keep it.
    """

    kind: ClassVar[IssueType]
    """The type of the issues that it opens."""

    @abstractmethod
    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        """Judge and remember the evidence of one step; return the issues that are open now."""

    def calm(self, config: GradientConfig) -> Band | None:
        """Return a band of ln of the norm in which none of the next `MOST_TOGETHER` steps opens an issue.

        This holds for steps with finite gradients of which clipping leaves more than `LEAST_LEFT`, and whose norm is
        less than ten times that of the step before and more than a tenth. Return None if every step has to be judged
        at once.
        """
        return None

    def remember(self, steps: CalmSteps) -> None:
        """Remember steps within the band of `calm`, as `judge` would have done one by one."""

    def open(
        self,
        evidence: Evidence,
        measured: tuple[str, float, float],
        message: str,
        recommendation: str,
        *,
        layer: str = "",
        **rest: Any,
    ) -> list[Issue]:
        """Return the one issue of the rule's type, at the step of the evidence; see `Issue.found`."""
        return [Issue.found(self.kind, layer, measured, message, recommendation, step=evidence.step, **rest)]
