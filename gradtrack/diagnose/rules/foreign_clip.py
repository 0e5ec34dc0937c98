"""Clipping outside gradtrack that decides every step."""

from __future__ import annotations

import math
from typing import Final

from gradtrack.diagnose.sample import Case, median
from gradtrack.reports import Issue, IssueSeverity, IssueType

_COEFFICIENT: Final = 0.01
_SAMPLES: Final = 4


def judge(case: Case) -> list[Issue]:
    """Open where the gradients at the optimizer's step are always under a hundredth of those that were measured."""
    found = [sample.clip for sample in case.samples if not math.isnan(sample.clip)]
    if len(found) < _SAMPLES or max(found[-max(_SAMPLES, len(found) // 2) :]) > _COEFFICIENT:
        return []
    typical = median(found)
    return [
        Issue(
            issue_type=IssueType.CLIP_SATURATED,
            severity=IssueSeverity.MEDIUM,
            message=f"Every sampled gradient was scaled down to {typical:.2g} of itself before the optimizer took it.",
            statistic="gradient_left_by_clipping",
            value=typical,
            threshold=_COEFFICIENT,
            window=len(found),
            step=case.step,
            confidence=0.9,
            recommendation=f"Raise the limit of the clipping about {1 / typical:.1g} times, or scale the loss down.",
        )
    ]
