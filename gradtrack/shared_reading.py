"""The reading of gradients that are spread over ranks, which have to agree on what they send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gradtrack.analyzers.base import Snapshot
from gradtrack.gauge import Gauge
from gradtrack.judgement import Judgement
from gradtrack.live import LiveAnalyzers
from gradtrack.measure.agreement import digest
from gradtrack.measure.gradients import SharedGradients
from gradtrack.measure.moments import Moments
from gradtrack.outcome import Outcome
from gradtrack.protect.guard import Guard

_Take = Callable[[Sequence[float], int], None]


class SharedReading:
    """Reads the gradients of all ranks, and takes to the analyzers what the ranks have sent for them along with it."""

    def __init__(self, gauge: Gauge, guard: Guard, judgement: Judgement, analyzers: LiveAnalyzers) -> None:
        self._gauge, self._guard, self._judgement, self._analyzers = gauge, guard, judgement, analyzers

    def read(
        self,
        grads: SharedGradients,
        outcome: Outcome,
        loss: Tensor | float | None,
        *,
        row_due: bool,
        shown: Callable[[], Snapshot],
    ) -> Moments:
        """Measure the gradients; `shown` returns what there is to see of them before that."""
        common = self._gauge.meet(partial(self._remembered, outcome.report.step), self._analyzers.offers)
        if common is not None:
            self._analyzers.share(common)
        more, take = self._contribute(outcome, shown)
        moments = self._gauge.read_shared(
            grads,
            outcome.facts,
            loss,
            row_due=row_due,
            first_nonfinite=not (self._judgement.nonfinite_before or outcome.repeated),
            limited=self._guard.foresight(scaled=outcome.scale is not None),
            more=more,
        )
        take(grads.more, len(grads.ranks.members))
        return moments

    def _contribute(self, outcome: Outcome, shown: Callable[[], Snapshot]) -> tuple[Sequence[float], _Take]:
        """Return what the ranks add up for the analyzers, and what takes the sums."""
        if outcome.repeated or not self._gauge.has_shards:
            return (), _nothing
        more, take_sums = self._analyzers.contribute(outcome.report.step, self._gauge.groups_to_send(), shown)

        def take(sums: Sequence[float], num_ranks: int) -> None:
            take_sums(sums, num_ranks)
            if self._analyzers.verdicts is not None:
                self._judgement.hear(self._analyzers.verdicts)

        return more, take

    def _remembered(self, step: int) -> dict[str, Any]:
        """Return what ranks decide by beside the settings and the sums: it has to be the same on all of them."""
        memory = digest((self._guard.clipper.state_dict(), self._judgement.nonfinite_before))
        return {"step": step, "max_grad_norm": self._guard.clipper.config.max_grad_norm, "memory": memory}


def _nothing(sums: Sequence[float], num_ranks: int) -> None:
    """Take no sums."""
