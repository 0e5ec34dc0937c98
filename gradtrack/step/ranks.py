"""Exchange between ranks: the sums of gradients, with those of the analyzers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gradtrack.analyzers.base import Snapshot
from gradtrack.gradients.collected import SharedGradients
from gradtrack.gradients.distributed.agreement import digest
from gradtrack.gradients.moments import Moments
from gradtrack.step.analyzers import RunningAnalyzers
from gradtrack.step.data import StepData
from gradtrack.step.judge import Judge
from gradtrack.step.measure import Measurement
from gradtrack.step.protect import Protection

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
