"""Updates that are far too small for the weights."""

from __future__ import annotations

from typing import Final

from gradtrack.diagnose.sample import Case, Sample, median
from gradtrack.reports import Issue, IssueSeverity, IssueType

_LOW: Final = 3e-6
_HEALTHY: Final = 1e-3
_SAMPLES: Final = 3
_LEARNED: Final = 0.5
_FLAT: Final = 1e-3
_QUICK: Final = 1e-3


def judge(case: Case) -> list[Issue]:
    """Open where no weight moves by a millionth of its size per step.

    Silent on a rate that is rising (warm-up) or has come down from a useful one, and where the loss is down already: it
    has fallen, or there is next to no slope left, or steps this small are as much as the slope asks for.
    """
    moved = case.moved
    if len(moved) < _SAMPLES:
        return []
    largest = max(max(sample.ratios.values(), default=1.0) for sample in moved)
    warming = moved[-1].lr > moved[0].lr
    if not largest < _LOW or warming or case.trend.remaining < _LEARNED or case.trend.falling or _is_down(moved):
        return []
    return [_issue(case, moved[-1], largest, len(moved))]


def _is_down(moved: list[Sample]) -> bool:
    """Whether a change of the weights by their own size, or the steps that are made, say that the loss is converged."""
    slope = median(sample.sensitivity for sample in moved)
    gain = median(sample.promised for sample in moved)
    return slope < _FLAT or gain > _QUICK


def _issue(case: Case, sample: Sample, largest: float, window: int) -> Issue:
    better = f"lr {sample.lr * _HEALTHY / largest:.1g}" if largest > 0 else "a learning rate of 1e-3"
    return Issue(
        issue_type=IssueType.LR_TOO_LOW,
        severity=IssueSeverity.MEDIUM,
        message=f"lr {sample.lr:.3g} moved no weight by more than {largest:.1e} of its size per step.",
        statistic="max_update_ratio",
        value=largest,
        threshold=_LOW,
        window=window,
        step=case.step,
        confidence=0.9,
        recommendation=f"Try {better}: healthy updates are near 1e-3 of the weight.",
    )
