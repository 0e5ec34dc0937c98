"""Exchange between ranks: the sums of gradients, with those of the analyzers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from torch import Tensor

from gradtrack.analyzers.base import Snapshot
from gradtrack.gradients.collected import SharedGradients
from gradtrack.gradients.distributed.agreement import digest
from gradtrack.gradients.distributed.shards import whole_loss
from gradtrack.gradients.moments import Moments
from gradtrack.step.analyzers import RunningAnalyzers
from gradtrack.step.data import StepData
from gradtrack.step.judge import Judge
from gradtrack.step.measure import Measurement
from gradtrack.step.protect import Protection

_CLIPS_THERE: Final = "(clips on the device)"
"""The offer of a rank, beside the names of analyzers."""


class RankExchange:
    """Measures the gradients over all ranks, and sets the sums of analyzers that the ranks send along with them."""

    def __init__(
        self, measurement: Measurement, protection: Protection, judge: Judge, analyzers: RunningAnalyzers
    ) -> None:
        self._measurement, self._protection, self._judge, self._analyzers = measurement, protection, judge, analyzers
        self.all_clip_there = True
        """Whether the engine of every rank clips on its device: where one cannot, no rank leaves a step there."""

    def agree(self, step: int, loss: Tensor | float | None, clips_there: Callable[[], bool]) -> Tensor | float | None:
        """Check that all ranks do the same from now on, if the settings or the parameters have changed.

        `clips_there` says whether the engine of this rank clips on its device. Return the loss, whole.
        """
        if self._measurement.table.ranks is None:
            return loss
        common = self._measurement.agree_with_ranks(
            partial(self._remembered, step),
            lambda: [*self._analyzers.offers, *([_CLIPS_THERE] if clips_there() else [])],
        )
        if common is not None:
            self.all_clip_there = _CLIPS_THERE in common
            self._analyzers.share(name for name in common if name != _CLIPS_THERE)
        return whole_loss(loss)

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
        analyzers, contributes = self._analyzers, self._measurement.has_shards and not data.repeated
        groups = self._measurement.groups_to_send() if contributes else ()
        more, take = analyzers.contribute(data.step, groups, shown) if contributes else ((), None)
        moments = self._measurement.read_shared(
            grads,
            data,
            loss,
            row_due=row_due,
            first_nonfinite=not (self._judge.nonfinite_before or data.repeated),
            limited=self._protection.foresight(scaled=data.scale is not None),
            more=more,
        )
        self._protection.spikes.losses_are_shared = True
        if take is not None:
            take(grads.more, len(grads.ranks.members))
            if analyzers.verdicts is not None:
                self._judge.set_analyzer_issues(analyzers.verdicts)
        return moments

    def largest(self, step: int) -> int:
        """Return the largest of a step of every rank that shares the parameters: one of them may save alone."""
        ranks = self._measurement.table.ranks
        return step if ranks is None else int(ranks.norms(np.array([float(step)]), math.inf)[0])

    def _remembered(self, step: int) -> dict[str, Any]:
        """Return the state by which a rank decides beside settings and sums; it must be equal on all ranks."""
        spikes = self._protection.spikes.state_dict()
        memory = digest((self._protection.clipper.state_dict(), self._judge.nonfinite_before, spikes))
        return {"step": step, "max_grad_norm": self._protection.clipper.config.max_grad_norm, "memory": memory}
