"""Exchange between ranks beside the sums of gradients: sums of analyzers, and their issues packed as numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from gradtrack.analyzers.base import Snapshot, rarely
from gradtrack.gradients.collected import SharedGradients
from gradtrack.gradients.distributed.agreement import digest
from gradtrack.gradients.moments import Moments
from gradtrack.reports import Issue, IssueSeverity, IssueType
from gradtrack.step.data import StepData
from gradtrack.step.judge import Judge
from gradtrack.step.measure import Measurement
from gradtrack.step.protect import Protection

if TYPE_CHECKING:
    from gradtrack.step.analyzers import RunningAnalyzers

_AFTER: Final = 2
_MOST_RANKS: Final = 2**16
_TYPES: Final = tuple(IssueType)
_SEVERITIES: Final = tuple(IssueSeverity)
NUM_VERDICTS: Final = len(_TYPES)


def due(step: int) -> bool:
    """Say whether ranks exchange verdicts: two steps after each rare analysis, when they send little else."""
    return step > _AFTER and rarely(step - _AFTER)


def pack(issues: Iterable[Issue]) -> list[float]:
    """Return a number for each type of issue; its sum tells how many ranks have the issue, and how severe it is."""
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
            issue = Issue(
                issue_type=kind,
                severity=_SEVERITIES[round(severities / count)],
                message=f"Found on {count} of {num_ranks} ranks, in the parts of the model that they hold.",
                statistic="ranks that find it",
                value=count,
                threshold=num_ranks / 2,
                step=step,
                recommendation="Call manager.diagnose() on a rank: it names the layers and tells what to do.",
            )
            found.append(issue)
    return found


_Take = Callable[[Sequence[float], int], None]


class RankExchange:
    """Measures the gradients over all ranks, and sets the sums of analyzers that the ranks send along with them."""

    def __init__(
        self, measurement: Measurement, protection: Protection, judge: Judge, analyzers: RunningAnalyzers
    ) -> None:
        self._measurement, self._protection, self._judge, self._analyzers = measurement, protection, judge, analyzers

    def read(
        self,
        grads: SharedGradients,
        data: StepData,
        loss: Tensor | float | None,
        *,
        row_due: bool,
        shown: Callable[[], Snapshot],
    ) -> Moments:
        """Measure the gradients over all ranks; `shown` returns a snapshot of this rank's shards."""
        common = self._measurement.agree_with_ranks(partial(self._remembered, data.step), self._analyzers.offers)
        if common is not None:
            self._analyzers.share(common)
        more, take = self._contribute(data, shown)
        moments = self._measurement.read_shared(
            grads,
            data,
            loss,
            row_due=row_due,
            first_nonfinite=not (self._judge.nonfinite_before or data.repeated),
            limited=self._protection.foresight(scaled=data.scale is not None),
            more=more,
        )
        take(grads.more, len(grads.ranks.members))
        return moments

    def _contribute(self, data: StepData, shown: Callable[[], Snapshot]) -> tuple[Sequence[float], _Take]:
        """Return the numbers that the ranks add up for the analyzers, and a function that sets the sums."""
        if data.repeated or not self._measurement.has_shards:
            return (), lambda sums, num_ranks: None
        more, take_sums = self._analyzers.contribute(data.step, self._measurement.groups_to_send(), shown)

        def take(sums: Sequence[float], num_ranks: int) -> None:
            take_sums(sums, num_ranks)
            if self._analyzers.verdicts is not None:
                self._judge.set_analyzer_issues(self._analyzers.verdicts)

        return more, take

    def _remembered(self, step: int) -> dict[str, Any]:
        """Return the state by which a rank decides beside settings and sums; it must be equal on all ranks."""
        memory = digest((self._protection.clipper.state_dict(), self._judge.nonfinite_before))
        return {"step": step, "max_grad_norm": self._protection.clipper.config.max_grad_norm, "memory": memory}
