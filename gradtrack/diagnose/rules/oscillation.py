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
_PARTS: Final = 4


def judge(case: Case) -> list[Issue]:
    """Open where the gradient turns round from step to step while its norm and the loss go up.

    Full-batch training at the edge of stability turns round as well, but its norm goes up and down again; small batches
    of two classes turn round by chance, but their loss does not rise.
    """
    cosines = [sample.cosine for sample in case.moved if not math.isnan(sample.cosine)]
    cosines = cosines[-max(_SAMPLES, len(cosines) // 2) :]
    if len(cosines) < _SAMPLES or sum(cosine < _COSINE for cosine in cosines) < _SHARE * len(cosines):
        return []
    norms = [norm for norm in case.series.log_norms if math.isfinite(norm)]
    if not _grows(norms) or not (case.trend.turning or max(cosines) < _EXACT):
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


def _grows(norms: list[float]) -> bool:
    """Whether the norm grows all through the last half of the run, and not up and down."""
    half = norms[len(norms) // 2 :]
    width = len(half) // _PARTS
    middles = [median(half[width * part : width * (part + 1)]) for part in range(_PARTS)] if width >= 2 else []
    return len(middles) == _PARTS and all(after > before for before, after in pairwise([*middles, norms[-1]]))
