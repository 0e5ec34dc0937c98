"""The data of one step, which the stages pass on, and the report fields and metrics that are made from it."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice, repeat
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, Protocol, Self

from torch import Tensor

from gradtrack.config import GradientConfig
from gradtrack.errors import NonFiniteGradientError
from gradtrack.gradients.collected import Gradients
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.moments import Moments, Rows, describe, describe_whole, finite_norm, spread
from gradtrack.gradients.variance import Deviations
from gradtrack.protection.spikes import SKIPPED_SPIKES
from gradtrack.records import Histogram
from gradtrack.reports import HealthReport, Issue, LateReport, Report, StepReport
from gradtrack.reports.metric_names import flat_metrics
from gradtrack.step.loss_scale import Scale
from gradtrack.support.interrupts import pass_on


def next_row(step: int, every: int) -> int:
    """Return the first step from `step` on that makes a row: every Nth, and 1, 2, 4, 8 ... before these."""
    return min(1 << (step - 1).bit_length(), every) if step <= every else step + -step % every


class Recorder(Protocol):
    """Keeps single steps for a later look: what a bad one was computed from, or fingerprints of its tensors."""

    def due(self, step: int) -> bool:
        """Whether the numbers of a step are needed before the optimizer steps."""

    def next_step(self, step: int) -> int:
        """Return the first step from this one on that has to pass all stages, whatever its numbers are."""

    def end_batch(self, batch: object) -> None:
        """Note that the backward pass of a micro-batch is over."""

    def measured(self, grads: Gradients, batch: object, data: StepData) -> None:
        """Look at a step whose gradients are as the backward pass has left them."""

    def judged(self, report: StepReport, data: StepData, finite: bool) -> None:
        """Look at a step that was judged, before the optimizer steps."""

    def close(self) -> None:
        """Remove the hooks from the model, and complete what was written."""


class Recorders(tuple[Recorder, ...]):
    """The recorders of a pair, mostly none."""

    def due(self, step: int) -> bool:
        """Whether one needs the numbers of a step before the optimizer steps."""
        return any(one.due(step) for one in self)

    def measured(self, grads: Gradients, batch: object, data: StepData) -> None:
        """Show them a step whose gradients are as the backward pass has left them."""
        for one in self:
            one.measured(grads, batch, data)

    def judged(self, report: StepReport, data: StepData, finite: bool) -> None:
        """Show them a step that was judged."""
        for one in self:
            one.judged(report, data, finite)

    def close(self) -> None:
        """Close each of them."""
        for one in self:
            one.close()


class StepData:
    """The data of one step, which each stage adds to: sums, clipping, issues, reports of analyzers, and notes.

    The report of the step keeps it and makes its fields from it when they are read. It is small, but for the rows of
    the single parameters, which `shrink` drops; `release` drops what only the stages need.
    """

    # Defaults on the class, since on nearly every step nearly all of them keep these values.
    step = 0
    epoch: int | None = None
    source = ""
    time = 0.0
    # 1 measure
    rows: Rows | None = None
    group_rows: Rows
    total: list[float]
    exponent = 0
    deviations: Deviations | None = None
    aliases: Mapping[str, list[str]] = MappingProxyType({})
    full = with_groups = True
    can_stay = False
    """Whether the numbers stay on their device where no analyzer is due, as it may be on this rank alone."""
    with_parameters = repeated = has_own_limit = False
    loss: float | None = None
    lr: Sequence[Sequence[tuple[Any, Any]]] = ()
    weight_norms: Mapping[str, float] = MappingProxyType({})
    weight_version = 0
    """The sum of the version counters of the optimizers' parameters, known with the norms of the weights."""
    histograms: Mapping[str, Histogram] = MappingProxyType({})
    """Histograms by group, that of all gradients under the empty name; for the trackers only."""
    ranks: Mapping[str, Any] | None = None
    scale: Scale | None = None
    loss_graph: object = None
    batch: object = None
    scaler: Mapping[str, Any] | None = None
    # 2 protect
    clipping: Mapping[str, Any] = MappingProxyType({})
    nan_inf: Mapping[str, Any] = MappingProxyType({"action": "none"})
    spike: Mapping[str, Any] | None = None
    skipped = False
    error: NonFiniteGradientError | None = None
    """The exception that is raised at the end of the step."""
    drift: Sequence[Issue] = ()
    """The issues of replicas that are no longer equal, which fingerprints have found."""
    # 3 judge
    health: HealthReport
    issues: Sequence[Issue] = ()
    opened: Sequence[Issue] = ()
    # 4 analyzers
    analyzers: Mapping[str, Report] = MappingProxyType({})
    late: Sequence[LateReport] = ()
    """Reports of analyzers on earlier steps, which were completed on this one."""
    notes: Sequence[str] = ()
    # 5 history and 6 rows
    norm: float | None = None
    event = False
    """Whether the step makes a row."""

    def __init__(self, layout: Layout, touched_rows: Mapping[str, int]) -> None:
        self.layout, self.touched_rows = layout, touched_rows

    @classmethod
    def begin(cls, grads: Gradients, config: GradientConfig, step: int, *, repeated: bool) -> Self:
        """Return the data of a step before its gradients are measured: its number, time and settings."""
        data = cls(grads.layout, grads.touched_rows)
        data.step, data.time, data.repeated = step, time.time(), repeated
        data.event = not repeated and step == next_row(step, config.grad_log_every_n_steps)
        measured = data.event or not (repeated or step % config.check_frequency)
        data.full = config.enable_gradient_monitoring and measured
        data.with_groups, data.with_parameters = config.grad_track_per_weight_matrix, config.track_parameters
        return data

    @property
    def clipped(self) -> bool:
        """Whether clipping engaged."""
        return bool(self.clipping.get("clipped", False))

    @property
    def leaves_out_spike(self) -> bool:
        """Whether the step is left out though its gradients are finite."""
        return self.spike is not None and self.spike["action"] in SKIPPED_SPIKES

    def release(self) -> None:
        """Drop what only the stages need, so that a report that is kept keeps no model alive."""
        self.scale = self.error = self.loss_graph = self.batch = None
        self.late = ()

    def set_moments(self, moments: Moments) -> None:
        """Set the sums of the gradients of the step."""
        self.rows, self.group_rows = moments.rows, moments.group_rows
        self.total, self.exponent = moments.total, moments.exponent

    def fields(self, *, with_statistics: bool = True) -> _Fields:
        """Return the fields of the report, but for those that it has from the start, such as its step.

        Each is made when it is looked up.
        """
        shown = self.full and with_statistics
        with_parameters = shown and self.with_parameters and self.rows is not None
        return _Fields(self, _made(shown, shown and self.with_groups, with_parameters))

    def metrics(self, *, with_statistics: bool = True) -> dict[str, float]:
        """Return what `report.metrics()` does, without the report; without statistics only health and clipping."""
        return self.fields(with_statistics=with_statistics).metrics(self.step, self.source)

    def shrink(self) -> None:
        """Drop the histograms, and the rows of the single parameters unless the report has to show them."""
        if self.histograms:
            self.histograms = {}
        if not self.with_parameters:
            self.rows = None
            self.group_rows = self.group_rows.copy()  # a view would keep the memory of all rows
            if self.deviations is not None:
                self.deviations = self.deviations._replace(rows=self.deviations.rows[:0].copy())

    def learning_rates(self) -> dict[str, float]:
        """Name the learning rate of each parameter group by its name or its position."""
        several, rates = len(self.lr) > 1, {}
        for position, groups in enumerate(self.lr):
            for index, (name, rate) in enumerate(groups):
                if not isinstance(rate, (int, float, Tensor)):  # as None, by which Adafactor finds its own
                    continue
                label = f"{position}.{name}" if several else str(name)
                rates[label if label not in rates else f"{label}.{index}"] = float(rate)
        return rates

    def norms(self) -> dict[str, float]:
        """Return the norm of every gradient over its finite elements."""
        assert self.rows is not None, "the rows of this step were dropped"
        rows = zip(self.layout.names, self.rows.tolist(), strict=True)
        return {name: finite_norm(row, self.exponent) for name, row in rows}

    def groups(self) -> dict[str, str]:
        """Return the group of every gradient."""
        layout = self.layout
        return {
            name: layout.group_names[group] for name, group in zip(layout.names, layout.group_of.tolist(), strict=True)
        }

    def parameters(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of every parameter that has a gradient."""
        layout, known = self.layout, self.deviations
        assert self.rows is not None, "the rows of this step were dropped"
        found = {}
        for index, row in enumerate(self.rows.tolist()):
            name = layout.names[index]
            found[name] = {
                **describe(
                    row,
                    layout.counts[index],
                    self.exponent,
                    squared_deviations=None if known is None else float(known.rows[index]),
                ),
                "group": layout.group_names[layout.group_of[index]],
                "aliases": self.aliases.get(name, []),
                "touched_rows": self.touched_rows.get(name),
            }
        return found

    def scaler_fields(self) -> dict[str, Any] | None:
        """Return the fields of a `ScalerReport`; reading the scale may wait for its device."""
        if self.scaler is None:
            return None
        scale = self.scaler["scale"]
        return {**self.scaler, "scale": None if scale is None else float(scale)}

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of all gradients."""
        known = None if self.deviations is None else self.deviations.total
        layout = self.layout
        return describe_whole(self.total, layout.total_count, layout.missing, self.exponent, squared_deviations=known)

    def described_groups(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of every group that has a gradient."""
        found = dict[str, dict[str, Any]]()
        for name, count, row, deviations in self._group_rows():
            found[name] = describe(row, count, self.exponent, squared_deviations=deviations)
            found[name]["weight_norm"] = self.weight_norms.get(name)
        return found

    def spread_of_groups(self) -> Iterator[tuple[str, tuple[float, float, float]]]:
        """Yield norm, variance and mean of every group that has a gradient."""
        for name, count, row, deviations in self._group_rows():
            yield name, spread(row, count, self.exponent, squared_deviations=deviations)

    def _group_rows(self) -> Iterator[tuple[str, int, list[float], float | None]]:
        """Yield name, count, row and, if known, squared deviations of every group that has a gradient."""
        layout, known = self.layout, self.deviations
        deviations = repeat(None) if known is None else known.groups.tolist()
        found = zip(layout.group_names, layout.group_counts, self.group_rows.tolist(), deviations, strict=False)
        return (one for one in found if one[1])


_FIELDS: Final[Mapping[str, Callable[[StepData], Any]]] = {
    "loss": attrgetter("loss"),
    "skipped": attrgetter("skipped"),
    "measured": attrgetter("full"),
    "lr": StepData.learning_rates,
    "health": attrgetter("health"),
    "clipping": attrgetter("clipping"),
    "nan_inf": attrgetter("nan_inf"),
    "ranks": attrgetter("ranks"),
    "scaler": StepData.scaler_fields,
    "spike": attrgetter("spike"),
    "analyzers": attrgetter("analyzers"),
    "notes": attrgetter("notes"),
    "statistics": StepData.statistics,
    "groups": StepData.described_groups,
    "parameters": StepData.parameters,
}
"""The fields of a report that are made from the data of its step."""


@cache
def _made(statistics: bool, groups: bool, parameters: bool) -> Mapping[str, Callable[[StepData], Any]]:
    shown = {"statistics": statistics, "groups": groups, "parameters": parameters}
    return {name: make for name, make in _FIELDS.items() if shown.get(name, True)}


class _Fields(Mapping[str, Any]):
    """The fields of a report, each made when it is looked up."""

    def __init__(self, data: StepData, made: Mapping[str, Callable[[StepData], Any]]) -> None:
        self._data, self._made = data, made

    def __getitem__(self, name: str) -> Any:
        return self._made[name](self._data)

    def get(self, name: str, default: Any = None) -> Any:
        make = self._made.get(name)
        return default if make is None else make(self._data)

    def metrics(self, step: int, source: str) -> dict[str, float]:
        """Return the metrics of the step, without all statistics of its groups."""
        groups = self._data.spread_of_groups() if "groups" in self._made else ()
        return flat_metrics(self, step, source, groups)

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


_PLAIN: Final = (str, int, float, bool, type(None))
_LOOKED_AT: Final = 64
_DEEPEST: Final = 4


def kept_batch(batch: object) -> object:
    """Return what a report keeps of a batch: plain data as it is, and of a tensor its type and shape in words.

    A thousand reports are kept, and a batch may be large and on a device. Of a long collection the first entries tell.
    """
    try:
        return _in_words(batch, 0)
    except Exception as fault:  # of the user's own container
        pass_on(fault)
        return f"<{type(batch).__name__}>"


def _in_words(batch: object, depth: int) -> object:
    if isinstance(batch, _PLAIN):
        return batch
    if isinstance(batch, Mapping) and depth < _DEEPEST:
        found = {key: _in_words(entry, depth + 1) for key, entry in islice(batch.items(), _LOOKED_AT)}
        return batch if type(batch) is dict and all(found[key] is batch[key] for key in found) else found
    if isinstance(batch, (list, tuple)) and depth < _DEEPEST:
        parts = [_in_words(entry, depth + 1) for entry in batch[:_LOOKED_AT]]
        return batch if all(map(operator.is_, parts, batch)) else parts
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return f"{str(getattr(batch, 'dtype', type(batch).__name__)).removeprefix('torch.')}{list(shape)}"
    return f"<{type(batch).__name__}>"
