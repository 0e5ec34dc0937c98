"""Gradients that are added to those of a step that is over."""

from __future__ import annotations

from typing import Final

from gradtrack.diagnose.rules.disconnected import _by_module, _common
from gradtrack.diagnose.sample import Case, module_of
from gradtrack.reports import Issue, IssueSeverity, IssueType

_SAMPLES: Final = 2


def judge(case: Case) -> list[Issue]:
    """Open where gradients were not zero before the backward pass though the optimizer had stepped in between."""
    counts: dict[str, int] = {}
    for sample in case.samples:
        for name in sample.stale:
            counts[name] = counts.get(name, 0) + 1
    names = [name for name, count in counts.items() if count >= _SAMPLES]
    if not names:
        return []
    everything = len(names) >= 0.9 * len(case.samples[-1].params)
    layer = "" if everything else _common(list(dict.fromkeys(module_of(name) for name in names)))
    whose = "All parameters" if everything else f"{len(names)} parameters, of {', '.join(_by_module(names))},"
    return [
        Issue(
            issue_type=IssueType.STALE_GRAD,
            severity=IssueSeverity.HIGH,
            layer=layer,
            message=f"{whose} still held the gradients of the last step when the next backward pass began.",
            statistic="samples_with_stale_gradients",
            value=float(max(counts.values())),
            threshold=float(_SAMPLES),
            window=len(case.samples),
            step=case.step,
            confidence=1.0,
            recommendation="Call optimizer.zero_grad() after every optimizer.step(); gradients add up until then.",
        )
    ]
