"""A norm that jumps far above its recent past, or above an absolute limit that the user gave."""

from __future__ import annotations

import math
from typing import Final, final

from gradtrack.config import GradientConfig
from gradtrack.diagnose.evidence import Evidence
from gradtrack.diagnose.rule import Rule
from gradtrack.diagnose.window import RollingMedian
from gradtrack.reports import Issue, IssueSeverity, IssueType

_WINDOW: Final = 50
_WARMUP: Final = 8
_DEVIATIONS: Final = 6.0
_JUMP: Final = math.log(10.0)
_LARGEST: Final = 700.0
"""Where exp() ends."""


@final
class SpikeRule(Rule):
    """Opens when ln of the norm is both six robust deviations and a factor of ten above the window's median.

    A spike does not enter the window, so that a run of them is one issue; a new level that lasts for a whole window is
    accepted as the new normal.
    """

    def __init__(self) -> None:
        self.window = RollingMedian(_WINDOW)
        self.streak = 0

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        found = self._absolute(evidence, config.exploding_threshold)
        log_norm = evidence.log_norm
        if not math.isfinite(log_norm):
            return found
        height = log_norm - self.window.median if len(self.window) >= _WARMUP else 0.0
        spike = height >= _JUMP and height > _DEVIATIONS * self.window.deviation
        self.streak = self.streak + 1 if spike else 0
        if spike and self.streak <= _WINDOW:
            return found or [self._relative(evidence, height)]
        if self.streak > _WINDOW:
            self.window = RollingMedian(_WINDOW)
            self.streak = 0
        self.window.push(log_norm)
        return found

    def _relative(self, evidence: Evidence, height: float) -> Issue:
        median, jump = math.exp(self.window.median), math.exp(min(height, _LARGEST))
        clipped = " Clipping bounded this update." if evidence.clipped else ""
        return Issue(
            issue_type=IssueType.EXPLODING,
            severity=IssueSeverity.HIGH,
            message=(
                f"The gradient norm jumped to {evidence.norm:.3g}, {jump:.3g} times "
                f"the median {median:.3g} of the last {len(self.window)} steps."
            ),
            statistic="norm_over_median",
            value=jump,
            threshold=math.exp(min(max(_JUMP, _DEVIATIONS * self.window.deviation), _LARGEST)),
            window=len(self.window),
            step=evidence.step,
            recommendation=f"Look at this batch; if it keeps happening, reduce the learning rate or clip.{clipped}",
        )

    def _absolute(self, evidence: Evidence, limit: float | None) -> list[Issue]:
        if limit is None or not evidence.norm > limit:
            return []
        return [
            Issue(
                issue_type=IssueType.EXPLODING,
                severity=IssueSeverity.HIGH,
                message=f"The gradient norm {evidence.norm:.3g} is above exploding_threshold={limit:g}.",
                statistic="norm",
                value=evidence.norm,
                threshold=limit,
                step=evidence.step,
                recommendation="Reduce the learning rate or clip; a limit in absolute terms moves with the loss scale.",
            )
        ]
