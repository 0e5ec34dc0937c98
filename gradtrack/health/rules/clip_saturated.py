"""CLIP_SATURATED: clipping decides the size of nearly every step."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final, final

from gradtrack.config import GradientConfig
from gradtrack.health.rule import ANY, LEAST_LEFT, Band, CalmStep, Evidence, Rule, has_chosen_limit
from gradtrack.reports import Issue, IssueSeverity, IssueType

_WINDOW: Final = 20
_SHARE: Final = 0.95
_EXCESS: Final = -math.log(LEAST_LEFT)
_NOT_CLIPPED: Final = -1.0


@final
class ClipSaturatedRule(Rule):
    """Opens when more than 95 % of steps are clipped and the median norm is a hundred times the limit.

    Silent on the default limit: only a limit that the user has set says what norm is to be expected.
    """

    kept_in_checkpoints = ("excess",)

    def __init__(self) -> None:
        self.excess: deque[float] = deque(maxlen=_WINDOW)

    def calm(self, config: GradientConfig) -> Band | None:
        return ANY if max(self.excess, default=0.0) < _EXCESS else None

    def remember(self, steps: Sequence[CalmStep]) -> None:
        for step in steps:
            if step.limit is not None:
                self.excess.append(step.log_norm - math.log(step.limit) if step.clipped else _NOT_CLIPPED)

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        log_norm, limit = evidence.log_norm, evidence.clip_threshold
        if limit is None or not math.isfinite(log_norm) or not has_chosen_limit(config):
            return []
        self.excess.append(log_norm - math.log(limit) if evidence.clipped else _NOT_CLIPPED)
        if len(self.excess) < _WINDOW or max(self.excess) < _EXCESS:
            return []
        median = statistics.median(self.excess)
        if median < _EXCESS:
            return []
        share = sum(excess > 0 for excess in self.excess) / _WINDOW
        if share <= _SHARE:
            return []
        return [
            Issue(
                issue_type=IssueType.CLIP_SATURATED,
                severity=IssueSeverity.LOW,
                message=(
                    f"{share:.0%} of the last {_WINDOW} steps were clipped, at a median norm of "
                    f"{math.exp(median):.3g} times the limit {limit:g}: the norm no longer matters."
                ),
                statistic="median_norm_over_limit",
                value=math.exp(median),
                threshold=math.exp(_EXCESS),
                window=_WINDOW,
                step=evidence.step,
                recommendation=(f"Set max_grad_norm near {math.exp(median) * limit:.2g}, or scale the loss down."),
            )
        ]
