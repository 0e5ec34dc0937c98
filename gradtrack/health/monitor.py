"""The gradient monitor: judges the health of gradients step by step, and keeps their statistics."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradtrack.config import GradientConfig
from gradtrack.gradients.collected import Gradients, find_deviations
from gradtrack.gradients.distributed.shards import local_numbers
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.moments import Moments, describe_whole
from gradtrack.health.rule import Evidence
from gradtrack.health.rule_engine import Health
from gradtrack.reports import GradientStatistics, HealthReport, Issue, StepReport, html
from gradtrack.reports.summary import has_finite
from gradtrack.support.state import Stateful


class GradientMonitor(Stateful):
    """Judges gradients against what came before them and keeps the statistics that its pictures show.

    A manager feeds its monitor by itself. Without a manager, call `check_gradient_health` to judge gradients, which
    remembers nothing, and `update_statistics` once a step, which does.
    """

    kept_in_checkpoints = ("health", "_step")

    def __init__(self, config: GradientConfig | None = None, *, measurer: Measurer | None = None) -> None:
        self.config = config if config is not None else GradientConfig()
        self.health = Health()
        self._kept: deque[GradientStatistics | StepReport] = deque(maxlen=self.config.max_gradient_history)
        self._measurer = measurer if measurer is not None else Measurer(self.config.engine)
        self._step = 0

    def check_gradient_health(self, gradients: Sequence[Tensor | None]) -> HealthReport:
        """Judge gradients as those of the coming step, without remembering them."""
        grads, moments = self._measure(gradients)
        issues = copy.deepcopy(self.health).judge(self._evidence(moments, grads.layout), self.config)
        return HealthReport.model_validate(HealthReport.of(issues))

    def update_statistics(self, gradients: Sequence[Tensor | None]) -> GradientStatistics:
        """Judge and remember the gradients of one step; return their statistics, as one vector."""
        grads, moments = self._measure(gradients)
        self.judge(self._evidence(moments, grads.layout))
        known, count = find_deviations(grads, moments), grads.layout.total_count
        deviations = None if known is None else known.total
        fields = describe_whole(moments.total, count, (), moments.exponent, squared_deviations=deviations)
        statistics = GradientStatistics(**fields)
        self._kept.append(statistics)
        self._step += 1
        return statistics

    @property
    def history(self) -> list[GradientStatistics]:
        """Return the statistics of the last measured steps."""
        found = (kept.statistics if isinstance(kept, StepReport) else kept for kept in list(self._kept))
        return [statistics for statistics in found if statistics is not None]

    def keep(self, *reports: StepReport) -> None:
        """Keep the reports of steps for the pictures; their statistics are computed when they are drawn."""
        if self._kept.maxlen != self.config.max_gradient_history:
            self._kept = deque(self._kept, maxlen=self.config.max_gradient_history)
        self._kept.extend(reports)

    def judge(self, evidence: Evidence) -> list[Issue]:
        """Judge and remember the evidence of one step; return the issues that are open."""
        return self.health.judge(evidence, self.config)

    def plot_gradient_statistics(self, save_path: str | Path) -> Path:
        """Draw the distribution, means, deviations, extremes and correlations of the kept statistics."""
        from gradtrack.drawing import figures
        from gradtrack.pages import pictures

        return figures.save(pictures.draw_gradient_statistics(self.history), Path(save_path))

    def _repr_html_(self) -> str:
        names = ("total_norm", "mean", "std", "min", "max", "zero_fraction")
        rows = [[getattr(found, name) if has_finite(found) else None for name in names] for found in self.history[-5:]]
        return html.card(f"The last {len(rows)} measured steps", table=html.grid(names, rows))

    def _evidence(self, moments: Moments, layout: Layout) -> Evidence:
        return Evidence(step=self._step + 1, norm=moments.norm, moments=moments, layout=layout)

    def _measure(self, gradients: Sequence[Tensor | None]) -> tuple[Gradients, Moments]:
        gradients = list(gradients)
        dense = [_dense(grad.detach()) for grad in gradients if grad is not None]
        group_of = np.zeros(len(dense), dtype=np.int64)
        names = [f"gradients[{index}]" for index, grad in enumerate(gradients) if grad is not None]
        layout = Layout(names, [], [grad.numel() for grad in dense], group_of, ["all"], [])
        grads = Gradients(dense, layout, {})
        return grads, grads.measure(self._measurer)


def _dense(grad: Tensor) -> Tensor:
    """Return the numbers of a gradient: the values of a sparse one, both parts of a complex one."""
    values = grad.coalesce().values() if grad.layout is torch.sparse_coo else grad
    return local_numbers(values)
