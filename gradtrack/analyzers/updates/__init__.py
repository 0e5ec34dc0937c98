"""The analyzer of updates: how far the optimizer moves the weights, and how its moments relate to the gradients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

from pydantic import Field
from torch import Tensor, nn

from gradtrack.analyzers.base import Analyzer, Schedule, Snapshot, model_of, often, panel
from gradtrack.analyzers.tools.offline import InputFunction, LossFunction, offline_steps, untouched
from gradtrack.analyzers.updates.sums import NUM_SHORT, NUM_SUMS, UpdateSums, WeightSample
from gradtrack.errors import UsageError
from gradtrack.gradients.groups import assign_groups
from gradtrack.gradients.native.threads import one_thread
from gradtrack.records import Panel
from gradtrack.reports import LateReport, Report
from gradtrack.reports.base import measured
from gradtrack.support.statistics import median

_NUMBERS = ("ratio", "unchanged_fraction", "gradient_cosine", "momentum_cosine", "moment_ratio")


class GroupUpdates(Report):
    """The update of one group of parameters; see `UpdatesReport`."""

    ratio: float | None = measured("updates/ratio/<group>", "The update ratio of one group of parameters.")
    unchanged_fraction: float | None = measured(
        "updates/unchanged_fraction/<group>", "Elements of one group that the step did not move.", unit="share"
    )
    gradient_cosine: float | None = None
    momentum_cosine: float | None = None
    moment_ratio: float | None = None
    num_elements: int = 0
    num_sampled: int = 0


class UpdatesReport(LateReport):
    """The optimizer's update at `step`, over sampled elements; None where it could not be measured.

    `ratio` is ‖Δw‖/‖w‖, often near 1e-3 in a healthy training. `unchanged_fraction` is the share of the elements with
    a gradient that did not move: in bfloat16 a weight does not move by under a 256th of itself. `gradient_cosine` is
    between the gradient of the step and the next one, `momentum_cosine` between that gradient and the optimizer's first
    moment, and `moment_ratio` is ‖m‖/√Σv with both moments freed of their bias: near 1 where gradients agree, small
    where they are noise.
    """

    ratio: float | None = measured("updates/ratio", "Length of the optimizer's step over that of the weights.")
    unchanged_fraction: float | None = measured(
        "updates/unchanged_fraction", "Elements with a gradient that the step did not move.", unit="share"
    )
    gradient_cosine: float | None = measured(
        "updates/gradient_cosine", "Cosine between the gradient of this step and of the next one."
    )
    momentum_cosine: float | None = measured(
        "updates/momentum_cosine",
        "Cosine between the gradient and the optimizer's first moment.",
        when="a first moment",
    )
    moment_ratio: float | None = measured(
        "updates/moment_ratio", "First moment over the root of the second.", when="both moments"
    )
    groups: dict[str, GroupUpdates] = Field(default_factory=dict)
    num_elements: int = 0
    num_sampled: int = 0
    num_steps: int = 1


@final
class UpdatesAnalyzer(Analyzer):
    """An analyzer of the optimizer's step, from the weights before and after it.

    The ratio ‖Δw‖/‖w‖ comes from the values, so it is right for momentum, adaptive rates, weight decay and clipping
    alike. Of all tensors together 65,536 elements are looked at, always the same ones, but no fewer than 4,096 of each,
    or `max_elements` of each. Since the step comes after the report of its gradients, it is reported
    with the next one and recorded under its own step. Ranks that share the parameters each look at the parts that they
    hold and add up what they have found: the report is that of the whole, with two numbers for each group. Reference:
    the update ratio of Karpathy's CS231n notes.

    Cost: on every 4th step up to 64, then on every 64th, a copy and a few reductions of the samples.

    >>> import torch
    >>> from gradtrack import GradientManager
    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> with GradientManager(analyzers=["updates"]) as manager:
    ...     for step in range(5):
    ...         optimizer.zero_grad()
    ...         report = manager.step(model, optimizer, model(torch.ones(1, 2)).sum() / 2**0.5)
    ...         optimizer.step()
    >>> found = report.analyzers["updates"]
    >>> found.step, round(found.ratio, 4), found.unchanged_fraction
    (4, 0.0072, 0.0)
    """

    report_type: ClassVar[type[Report]] = UpdatesReport
    adds_up: ClassVar[bool] = True
    schedule: ClassVar[Schedule] = staticmethod(often)
    foresees: ClassVar[bool] = True
    panels: ClassVar[tuple[Panel, ...]] = (
        panel("Update to weight", "updates/ratio", log_scale=True),
        panel("Update to weight, by group", "updates/ratio/*", log_scale=True),
        panel("Share that did not move", "updates/unchanged_fraction"),
        panel("Agreement of gradients", "updates/gradient_cosine", "updates/momentum_cosine"),
        panel("First moment over the root of the second", "updates/moment_ratio"),
    )

    def __init__(self, model: nn.Module | None = None, *, max_elements: int | None = None) -> None:
        if max_elements is not None and max_elements < 1:
            raise UsageError(f"max_elements {max_elements}: expected at least 1.")
        self._model, self._most = model, max_elements
        self._before: tuple[int, WeightSample] | None = None
        self._groups: list[str] = []

    @classmethod
    def suits(cls, model: nn.Module) -> str | None:
        return "every training has updates"

    def analyze(
        self, input_fn: InputFunction, loss_fn: LossFunction, steps: int = 20, *, optimizer: Any = None
    ) -> UpdatesReport:
        """Let an optimizer train for some steps and return the medians over them; it changes the model."""
        model, found = model_of(self, self._model), []
        if optimizer is None:
            raise UsageError(
                "analyze without an optimizer: expected the one whose steps are measured. Pass optimizer=."
            )
        names = [name for name, param in model.named_parameters() if param.requires_grad]
        groups = dict(zip(names, assign_groups(model, names, {}), strict=True))
        before: WeightSample | None = None
        with untouched(model, optimizer):
            for step, *_ in offline_steps(model, input_fn, loss_fn, steps, optimizer):
                gradients = _gradients(model)
                if before is not None:
                    found.append(_report(step - 1, before, gradients, [optimizer]))
                before = WeightSample(model, gradients, groups, self._most)
            if before is not None:
                found.append(_report(steps, before, {}, [optimizer]))
        return _medians(found)

    def due(self, step: int) -> bool:
        return self.scheduled(step) or self.scheduled(step - 1)

    def num_sums(self, step: int, num_groups: int) -> int:
        return NUM_SUMS + NUM_SHORT * num_groups if step > 1 and self.scheduled(step - 1) else 0

    def sums(self, snapshot: Snapshot, groups: Sequence[str]) -> Sequence[float]:
        before, self._groups = self._before, list(groups)
        if before is None or before[0] != snapshot.step - 1:
            return ()
        found = before[1].sums(snapshot.gradients, snapshot.optimizers, snapshot.counts_as)
        short = [found.get(group, UpdateSums())[:NUM_SHORT] for group in groups]
        return [*UpdateSums.together(found.values()), *itertools.chain.from_iterable(short)]

    def inspect(self, snapshot: Snapshot) -> UpdatesReport | None:
        with one_thread():
            return self._look(snapshot)

    def _look(self, snapshot: Snapshot) -> UpdatesReport | None:
        report, before, self._before = None, self._before, None
        if before is not None and before[0] == snapshot.step - 1:
            if snapshot.counts_as is None:
                report = _report(*before, snapshot.gradients, snapshot.optimizers)
            elif snapshot.sums is not None:
                report = _report_of_all(before[0], snapshot.sums, self._groups)
        if self.scheduled(snapshot.step) and not snapshot.skipped:
            sample = WeightSample(snapshot.model, snapshot.gradients, snapshot.groups, self._most)
            self._before = (snapshot.step, sample)
        return report if report is not None and report.metrics() else None


def _report(
    step: int, before: WeightSample, gradients: Mapping[str, Tensor], optimizers: Sequence[Any]
) -> UpdatesReport:
    groups = before.sums(gradients, optimizers)
    return _described(step, UpdateSums.together(groups.values()), groups)


def _report_of_all(step: int, sums: Sequence[float], names: Sequence[str]) -> UpdatesReport:
    """Return the report from the sums over all ranks: the numbers of the whole, then few of each group."""
    rest = [sums[start : start + NUM_SHORT] for start in range(NUM_SUMS, len(sums), NUM_SHORT)]
    groups = {name: UpdateSums(*numbers) for name, numbers in zip(names, rest, strict=True)}
    return _described(step, UpdateSums(*sums[:NUM_SUMS]), groups)


def _described(step: int, everything: UpdateSums, groups: Mapping[str, UpdateSums]) -> UpdatesReport:
    return UpdatesReport(
        step=step,
        groups={group: GroupUpdates(**_numbers(sums)) for group, sums in groups.items() if sums.num_sampled},
        **_numbers(everything),
    )


def _numbers(sums: UpdateSums) -> dict[str, Any]:
    counts = {"num_elements": round(sums.num_elements), "num_sampled": round(sums.num_sampled)}
    return {name: getattr(sums, name) for name in _NUMBERS} | counts


def _medians(reports: Sequence[UpdatesReport]) -> UpdatesReport:
    last = reports[-1]
    groups = {
        group: one.model_copy(update=_middle([report.groups[group] for report in reports if group in report.groups]))
        for group, one in last.groups.items()
    }
    return last.model_copy(update={**_middle(reports), "groups": groups, "num_steps": len(reports)})


def _middle(reports: Sequence[Report]) -> dict[str, float | None]:
    known = {name: [report[name] for report in reports if report[name] is not None] for name in _NUMBERS}
    return {name: median(values) for name, values in known.items()}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
