"""Updates that are far too large for the weights."""

from __future__ import annotations

from typing import Final

from gradtrack.diagnose.sample import Case, Sample, median, windowed
from gradtrack.reports import Issue, IssueSeverity, IssueType

_HIGH: Final = 0.075
_RISEN: Final = 0.03
_HEALTHY: Final = 1e-3
_THROWN: Final = 0.7
_SAMPLES: Final = 3


@windowed
def judge(case: Case) -> list[Issue]:
    """Open where the median weight moves by over 7.5 % a step, sample after sample, and the loss has not come down.

    Three per cent are enough where the loss is worse than before the training. One step is enough that, as the very
    first, leaves nothing of most of the weights: after it even large steps are small beside what they have become.
    """
    if case.moved and _is_thrown(case.moved[0]) and not case.trend.learned:
        return [_thrown(case, case.moved[0])]
    moved = [sample for sample in case.moved if sample.step > 1][-_SAMPLES:]
    if len(moved) < _SAMPLES:
        return []
    ratios = [_of_grown(case, sample) for sample in moved]
    if not all(ratios):
        return []
    typical = min(median(found.values()) for found in ratios)
    limit = _RISEN if case.trend.risen else _HIGH
    if not typical > limit or case.trend.learned:
        return []
    return [_issue(case, moved[-1], ratios[-1], typical, limit)]


def _of_grown(case: Case, sample: Sample) -> dict[str, float]:
    """Return the update ratios of the weights that are not growing from zero, as those of an adapter do."""
    began = {name for name, param in case.samples[0].params.items() if param.weight == 0}
    return {name: ratio for name, ratio in sample.ratios.items() if name not in began}


def _is_thrown(sample: Sample) -> bool:
    ratios = [ratio for name, ratio in sample.ratios.items() if sample.params[name].weight > 0]
    return sample.step == 1 and len(ratios) > 0 and median(ratios) > _THROWN


def _thrown(case: Case, sample: Sample) -> Issue:
    typical = median(sample.ratios.values())
    return _issue(case, sample, sample.ratios, typical, _THROWN).model_copy(update={"step": 1, "window": 1})


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
