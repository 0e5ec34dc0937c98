"""The verdict on a game: whether its players go round each other, by the rotation of their field and the norms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

from gradtrack.reports import Issue, IssueSeverity, IssueType

_ROTATION: Final = 0.5
_PURE: Final = 0.95
_SHRUNK: Final = 0.7
_STEPS: Final = 8


def judge(rotation: float | None, log_norms: Sequence[float] = (), step: int = 0) -> list[Issue]:
    """Open where rotation outweighs the rest and the norm does not fall; without norms, where there is little else.

    Rotation alone is no fault: a game whose players approach each other on a spiral gets there.
    """
    if rotation is None or not rotation > _ROTATION:
        return []
    norms = [norm for norm in log_norms if math.isfinite(norm)]
    known = len(norms) >= _STEPS
    if known and statistics.median(norms[-len(norms) // 4 :]) < norms[0] + math.log(_SHRUNK):
        return []
    if not known and not rotation > _PURE:
        return []
    return [
        Issue(
            issue_type=IssueType.ROTATION,
            severity=IssueSeverity.HIGH if known else IssueSeverity.MEDIUM,
            message=(
                f"{rotation:.0%} of the players' field is rotation"
                + (", and its norm does not fall: they go round each other." if known else ": they may go in circles.")
            ),
            statistic="rotation",
            value=rotation,
            threshold=_ROTATION if known else _PURE,
            window=max(1, len(norms)),
            step=step,
            confidence=0.9 if known else 0.6,
            recommendation="Let the players step in turn, use extragradient or averaging, or add a penalty on both.",
        )
    ]
