"""Updates that are far too small for the weights."""

from __future__ import annotations

from typing import Final

from gradtrack.diagnose.sample import Case, Sample, median, module_of
from gradtrack.reports import Issue, IssueSeverity, IssueType

_LOW: Final = 3e-6
_QUITE_LOW: Final = 2e-5
_NOTHING: Final = 1e-4
_COME_DOWN: Final = 1e-2
_PART: Final = 1e-4
_STILL: Final = 1e-5
_MOVING: Final = 1e-4
_FELT: Final = 1e-2
_HEALTHY: Final = 1e-3
_SAMPLES: Final = 3
_LEARNED: Final = 0.5
_FLAT: Final = 1e-3
_QUICK: Final = 1e-3


def judge(case: Case) -> list[Issue]:
    """Open where no weight moves by a millionth of its size per step.

    Silent on a rate that is rising (warm-up), and where the loss is down already: it has fallen, or there is next to no
    slope left, or steps this small are as much as the slope asks for. A rate that has come down is judged by the last
    half of the samples: what a schedule has left undone by then is not done any more. Where even the slope promises
    nothing of the loss, some more than a millionth is too small as well.
    """
    moved = case.moved
    if len(moved) < _SAMPLES or moved[-1].lr > moved[0].lr:
        return []
    came_down = moved[-1].lr < _COME_DOWN * moved[0].lr and len(moved) >= 2 * _SAMPLES
    judged = moved[-(len(moved) // 2) :] if came_down else moved
    largest = max(max(sample.ratios.values(), default=1.0) for sample in judged)
    limit = _LOW if came_down or median(sample.promised for sample in judged) > _NOTHING else _QUITE_LOW
    if not largest < limit or case.trend.remaining < _LEARNED or case.trend.falling or _is_down(judged):
        return _of_a_part(case)
    return [_issue(case, judged[-1], largest, len(judged))]


def _of_a_part(case: Case) -> list[Issue]:
    """Judge the weights that hardly move by themselves though their gradient is as large as that of the others.

    Where the loss comes down without them, the lower layers of a trained model may be meant to move far less, but not
    a hundred thousand times.
    """
    still: set[str] | None = None
    part = _PART if case.trend.remaining >= _LEARNED else _STILL
    for sample in case.moved:
        usual, slope = median(sample.ratios.values()), median(param.relative for param in sample.params.values())
        if not usual > _MOVING:
            return []
        found = {
            name
            for name, ratio in sample.ratios.items()
            if 0 < ratio < part * usual and sample.params[name].relative > _FELT * slope
        }
        still = found if still is None else still & found
    if not still:
        return []
    last, name = case.moved[-1], min(still)
    largest, usual = max(last.ratios[one] for one in still), median(last.ratios.values())
    issue = _issue(case, last, largest, len(case.moved))
    what = f"{len(still)} weights, of {name}, move by {largest:.1e} of their size per step, unlike all others."
    how = f"Multiply the rate of their group by {usual / largest:.1g}, which would move them like the median weight."
    return [issue.model_copy(update={"layer": module_of(name), "message": what, "recommendation": how})]


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
