"""Updates and gradients that 16 bits cannot hold."""

from __future__ import annotations

from typing import Final

from gradtrack.diagnose.sample import Case, Sample, median
from gradtrack.reports import Issue, IssueSeverity, IssueType

_LOST: Final = 0.9
_TINY: Final = 0.5
_SAMPLES: Final = 3


def judge(case: Case) -> list[Issue]:
    """Open where over 90 % of 16-bit weights stay as they are, or over half of float16 gradients underflow."""
    moved = case.moved[-_SAMPLES:]
    if len(moved) < _SAMPLES:
        return []
    lost = [_shares(sample, "unchanged") for sample in moved]
    tiny = [_shares(sample, "subnormal") for sample in moved]
    if all(share > _TINY for share in tiny):
        what = f"{median(tiny):.0%} of the elements of the float16 gradients are too small to keep their precision."
        advice = "Scale the loss up with torch.amp.GradScaler, or train in bfloat16."
        return [_issue(case, "subnormal_gradients", median(tiny), _TINY, what, advice)]
    if all(share > _LOST for share in lost):
        what = f"At lr {moved[-1].lr:.3g}, {median(lost):.0%} of the 16-bit weights are rounded back to what they were."
        advice = "Keep the weights in float32 and use autocast, or an optimizer with float32 master weights."
        return [_issue(case, "unchanged_elements", median(lost), _LOST, what, advice)]
    return []


def _shares(sample: Sample, which: str) -> float:
    """Return the median over the 16-bit weights that the optimizer has, NaN where there are none."""
    return median(
        getattr(change, which)
        for name, change in (sample.changes or {}).items()
        if name in sample.params and sample.params[name].coarse and sample.params[name].owned
    )


def _issue(case: Case, statistic: str, value: float, threshold: float, message: str, advice: str) -> Issue:
    return Issue(
        issue_type=IssueType.NUMERICAL,
        severity=IssueSeverity.HIGH,
        message=message,
        statistic=statistic,
        value=value,
        threshold=threshold,
        window=_SAMPLES,
        step=case.step,
        confidence=0.9,
        recommendation=advice,
    )
