"""Updates that are far too large for the weights."""

from __future__ import annotations

from typing import Final

from gradtrack.diagnose.sample import Case, Sample, median, windowed
from gradtrack.reports import Issue, IssueSeverity, IssueType

_HIGH: Final = 0.075
_RISEN: Final = 0.03
_HEALTHY: Final = 1e-3
_SAMPLES: Final = 3


@windowed
def judge(case: Case) -> list[Issue]:
    """Open where the median weight moves by over 7.5 % a step, sample after sample, and the loss has not come down.

    Three per cent are enough where the loss is worse than before the training.
    """
    moved = case.moved[-_SAMPLES:]
    if len(moved) < _SAMPLES:
        return []
    ratios = [sample.ratios for sample in moved]
    if not all(ratios):
        return []
    typical = min(median(found.values()) for found in ratios)
    limit = _RISEN if case.trend.risen else _HIGH
    if not typical > limit or case.trend.learned:
        return []
    return [_issue(case, moved[-1], ratios[-1], typical, limit)]


def _issue(case: Case, sample: Sample, ratios: dict[str, float], typical: float, limit: float) -> Issue:
    name = max(ratios, key=lambda key: ratios[key])
    return Issue(
        issue_type=IssueType.LR_TOO_HIGH,
        severity=IssueSeverity.HIGH,
        message=(
            f"lr {sample.lr:.3g} moved {name} by {ratios[name]:.0%} per step and the median weight by {typical:.0%}, "
            "while the loss does not fall."
        ),
        statistic="median_update_ratio",
        value=typical,
        threshold=limit,
        window=_SAMPLES,
        step=case.step,
        confidence=0.9,
        recommendation=(
            f"Try lr {sample.lr * _HEALTHY / typical:.1g}, which would move the median weight by 0.1 % per step."
        ),
    )
