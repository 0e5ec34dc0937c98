"""A gradient that goes round and round."""

from __future__ import annotations

import math
from typing import Final

from gradtrack.diagnose.sample import Case, Sample, median
from gradtrack.reports import Issue, IssueSeverity, IssueType

_BACK: Final = -0.7
_SMOOTH: Final = 0.5
_SAMPLES: Final = 4


def judge(case: Case) -> list[Issue]:
    """Open where the gradient turns right round, a little at each step, and is as long as ever while it does.

    A ball that rolls to and fro in a valley turns round as well, but its gradient is short at the bottom, or shorter
    each time; and where a loss falls, no gradient comes back the way it went.
    """
    seen = [sample for sample in case.moved if not math.isnan(sample.cosine)]
    if len(seen) < _SAMPLES or min(sample.cosine for sample in seen) < _SMOOTH or case.trend.learned:
        return []
    turned = [sample for sample in seen if sample.turned < _BACK]
    if not turned or not _is_lasting(seen):
        return []
    return [_issue(case, turned[-1], len(seen))]


def _is_lasting(seen: list[Sample]) -> bool:
    """Whether the gradient never gets short, from the first sample to the last."""
    norms = [math.hypot(*(param.norm for param in sample.params.values())) for sample in seen]
    return min(norms) > 0.5 * median(norms) and norms[-1] > 0.7 * norms[0]


def _issue(case: Case, sample: Sample, window: int) -> Issue:
    return Issue(
        issue_type=IssueType.ROTATION,
        severity=IssueSeverity.HIGH,
        message=(
            f"The gradient has turned right round (cosine {sample.turned:.2f}) by small turns (cosine "
            f"{sample.cosine:.2f} from step to step) without getting shorter: the weights go in circles."
        ),
        statistic="cosine_with_earlier_gradient",
        value=sample.turned,
        threshold=_BACK,
        window=window,
        step=case.samples[0].step,
        confidence=0.8,
        recommendation="Let the players step in turn, use extragradient or averaging, or add a penalty on both.",
    )
