"""The absolute limits on the norm of a step, which act only where a user gave them."""

from __future__ import annotations

from gradtrack.diagnose.evidence import Evidence
from gradtrack.reports import Issue, IssueSeverity, IssueType


def beyond_limit(evidence: Evidence, kind: IssueType, limit: float | None) -> list[Issue]:
    """Return the issue of a norm above `exploding_threshold`, or below `vanishing_threshold`."""
    large = kind is IssueType.EXPLODING
    if limit is None or not (evidence.norm > limit if large else evidence.norm < limit):
        return []
    name = "exploding_threshold" if large else "vanishing_threshold"
    remedy = "Reduce the learning rate or clip" if large else "Look for saturated units or raise the learning rate"
    return [
        Issue(
            issue_type=kind,
            severity=IssueSeverity.HIGH,
            message=f"The gradient norm {evidence.norm:.3g} is {'above' if large else 'below'} {name}={limit:g}.",
            statistic="norm",
            value=evidence.norm,
            threshold=limit,
            step=evidence.step,
            recommendation=f"{remedy}; a limit in absolute terms moves with the loss scale.",
        )
    ]
