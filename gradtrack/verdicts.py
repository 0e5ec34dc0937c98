"""What the analyzers of ranks that share the parameters find, so that all of them open the same issues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from gradtrack.analyzers.base import rarely
from gradtrack.reports import Issue, IssueSeverity, IssueType

_AFTER: Final = 2
_MOST_RANKS: Final = 2**16
_TYPES: Final = tuple(IssueType)
_SEVERITIES: Final = tuple(IssueSeverity)
NUM_VERDICTS: Final = len(_TYPES)


def due(step: int) -> bool:
    """Say whether ranks exchange verdicts: two steps after each at which analyzers are judged, when little is sent."""
    return step > _AFTER and rarely(step - _AFTER)


def pack(issues: Iterable[Issue]) -> list[float]:
    """Return a number for each type of issue, from whose sum over ranks follow how many have it and how severe."""
    worst: dict[IssueType, int] = {}
    for issue in issues:
        worst[issue.issue_type] = max(worst.get(issue.issue_type, 0), _SEVERITIES.index(issue.severity))
    return [float(1 + _MOST_RANKS * worst[kind]) if kind in worst else 0.0 for kind in _TYPES]


def unpack(sums: Sequence[float], num_ranks: int, step: int) -> list[Issue]:
    """Return the issues that more than half of the ranks have, each as severe as it is on average."""
    found = []
    for kind, number in zip(_TYPES, sums, strict=True):
        severities, count = divmod(round(number), _MOST_RANKS)
        if 2 * count > num_ranks:
            found.append(_issue(kind, _SEVERITIES[round(severities / count)], count, num_ranks, step))
    return found


def _issue(kind: IssueType, severity: IssueSeverity, count: int, num_ranks: int, step: int) -> Issue:
    return Issue(
        issue_type=kind,
        severity=severity,
        message=f"{count} of {num_ranks} ranks find it in the parts of the model that they hold.",
        statistic="ranks that find it",
        value=float(count),
        threshold=num_ranks / 2,
        step=step,
        recommendation="Call manager.diagnose() on a rank: it names the layers and tells what to do.",
    )
