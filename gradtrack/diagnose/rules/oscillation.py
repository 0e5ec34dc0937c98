"""Successive gradients that point against each other."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

from gradtrack.diagnose.sample import Case, median
from gradtrack.reports import Issue, IssueSeverity, IssueType

_COSINE: Final = -0.3
_EXACT: Final = -0.8
_SHARE: Final = 0.8
_SAMPLES: Final = 4


def judge(case: Case) -> list[Issue]:
    """Open where the gradient turns round from step to step while its norm and the loss go up.

    Full-batch training at the edge of stability turns round as well, but its loss falls; small batches of two classes
    turn round by chance, but their loss does not rise.
    """
    cosines = [sample.cosine for sample in case.moved if not math.isnan(sample.cosine)]
    cosines = cosines[-max(_SAMPLES, len(cosines) // 2) :]
    if len(cosines) < _SAMPLES or sum(cosine < _COSINE for cosine in cosines) < _SHARE * len(cosines):
        return []
    norms = [norm for norm in case.series.log_norms if math.isfinite(norm)]
    third = len(norms) // 3
    grows = third >= 4 and median(norms[-third:]) > median(norms[-2 * third : -third])
    if not grows or not (case.trend.turning or (max(cosines) < _EXACT and _is_steady(norms[len(norms) // 2 :]))):
        return []
    lr = case.moved[-1].lr
    return [
        Issue(
            issue_type=IssueType.UNSTABLE,
            severity=IssueSeverity.HIGH,
            message=(
                f"Successive gradients point against each other (median cosine {median(cosines):.2f}) and grow: "
                "every step jumps across the minimum."
            ),
            statistic="gradient_cosine",
            value=median(cosines),
            threshold=_COSINE,
            window=len(cosines),
            step=case.step,
            confidence=0.9,
            recommendation=f"Halve the learning rate {lr:.3g} to {lr / 2:.2g}, or more: it is past 2/curvature.",
        )
    ]


def _is_steady(norms: list[float]) -> bool:
    """Whether the norm grows step by step, and not by a jump or two."""
    rises = sum(after > before for before, after in pairwise(norms))
    return rises >= _SHARE * (len(norms) - 1)
