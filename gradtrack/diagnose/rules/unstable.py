"""A norm that jumps up and down by orders of magnitude from step to step."""

from __future__ import annotations

import math
from collections import deque
from typing import Final, final

from gradtrack.config import GradientConfig
from gradtrack.diagnose.evidence import Evidence
from gradtrack.diagnose.rule import Rule
from gradtrack.reports import Issue, IssueSeverity, IssueType

_WINDOW: Final = 20
_CHANGE: Final = math.log(10.0)


@final
class UnstableRule(Rule):
    """Opens when at least half of the last twenty steps changed the norm by more than a factor of ten."""

    def __init__(self) -> None:
        self.last = math.nan
        self.jumps: deque[bool] = deque(maxlen=_WINDOW)
        self.count = 0

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        log_norm = evidence.log_norm
        if not math.isfinite(log_norm):
            return []
        if not math.isnan(self.last):
            self._push(abs(log_norm - self.last) > _CHANGE)
        self.last = log_norm
        if len(self.jumps) < _WINDOW or self.count * 2 < _WINDOW:
            return []
        return [
            Issue(
                issue_type=IssueType.UNSTABLE,
                severity=IssueSeverity.MEDIUM,
                message=f"The gradient norm changed more than tenfold on {self.count} of the last {_WINDOW} steps.",
                statistic="tenfold_change_share",
                value=self.count / _WINDOW,
                threshold=0.5,
                window=_WINDOW,
                step=evidence.step,
                recommendation="Reduce the learning rate, use larger batches, or look for batches that differ in kind.",
            )
        ]

    def _push(self, jumped: bool) -> None:
        if len(self.jumps) == _WINDOW:
            self.count -= self.jumps[0]
        self.jumps.append(jumped)
        self.count += jumped
