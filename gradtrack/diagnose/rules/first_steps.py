"""Gradients that were huge on the very first steps, and never again."""

from __future__ import annotations

import math
from typing import Final

from gradtrack.diagnose.sample import Case, median, module_of
from gradtrack.reports import Issue, IssueSeverity, IssueType

_LARGE: Final = 1e3
_FIRST: Final = 4
_REST: Final = 8


def judge(case: Case) -> list[Issue]:
    """Open where the norm of a first step was a thousand times that of the steps after, and the loss has not halved.

    What such a step leaves behind, dead or saturated units, is then only its consequence. Where targets are large, the
    norm falls because the loss does.
    """
    norms = case.series.first_log_norms
    rest = [norm for norm in norms[_FIRST:] if math.isfinite(norm)]
    begun = [norm for norm in norms[:_FIRST] if math.isfinite(norm)]
    if not begun or len(rest) < _REST or _has_halved(case):
        return []
    jump = math.exp(min(max(begun) - median(rest), 700.0))
    if not jump > _LARGE:
        return []
    layer = _largest(case) if norms[0] == max(begun) else ""
    return [
        Issue(
            issue_type=IssueType.EXPLODING,
            severity=IssueSeverity.HIGH,
            layer=layer,
            message=f"The gradient of the first steps was {jump:.2g} times the next, and the loss has not fallen.",
            statistic="first_norm_over_next",
            value=jump,
            threshold=_LARGE,
            window=len(norms),
            step=norms.index(max(begun)) + 1,
            confidence=0.9,
            recommendation="Initialise for a gain near 1, clip the gradient norm, or begin with a small learning rate.",
        )
    ]


def _has_halved(case: Case) -> bool:
    first, last = case.series.first_losses[:1], median(list(case.series.losses)[-_REST:])
    return last < 0.5 * first[0] if first and first[0] > 0 else case.trend.learned


def _largest(case: Case) -> str:
    """Return the module whose gradient was the largest on the first step, beside its weight."""
    params = case.samples[0].params if case.samples and case.samples[0].step == 1 else {}
    relative = {name: param.relative for name, param in params.items() if param.ndim > 1 and param.weight > 0}
    return module_of(max(relative, key=lambda name: relative[name])) if relative else ""
