"""The data that backends receive: `Record`, `Panel`, `Metric`, `Histogram`, `RunInfo`, and the check of metrics."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from gradtrack.errors import InputTypeError, UsageError

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_PLACE = re.compile(r"<[^<>]+>")
_HEALTHY = "train/grad_healthy"

PanelKind = Literal["line", "multi-line", "band", "image", "text"]
Identity = tuple[str, int, float, frozenset[str]]


def tail_of(source: str) -> str:
    """Return the suffix of a pair's metric names; empty for the only pair, which has no name."""
    return f"/{source}" if source else ""


@dataclass(frozen=True, slots=True)
class Metric:
    """The meaning of a name in `Record.metrics`, kept beside the code that emits it.

    `<...>` in the name stands for a part that differs from run to run, such as a group or a layer. `when` says what it
    takes for the metric to be there; empty means always.
    """

    name: str
    meaning: str
    _: KW_ONLY
    unit: str = ""
    when: str = ""

    def matches(self, name: str) -> bool:
        """Whether an emitted name is this metric."""
        pattern = ".+".join(re.escape(part) for part in _PLACE.split(self.name))
        return re.fullmatch(pattern, name) is not None

    @staticmethod
    def filled(name: str, part: str) -> str:
        """Return a name with the first of its `<...>` replaced."""
        return _PLACE.sub(lambda _: part, name, count=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart, declared once and drawn by each tracker in its own way.

    A `band` has exactly three metrics: the value, its lower and its upper limit. A metric that ends in `/*` stands
    for every metric that begins with what precedes the star.
    """

    title: str
    section: str
    metrics: tuple[str, ...]
    kind: PanelKind = "line"
    log_scale: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(PanelKind):
            known = ", ".join(get_args(PanelKind))
            raise UsageError(
                f"panel {self.title!r} of kind {self.kind!r}: expected one of {known}. Choose one of them."
            )

    def has_data(self, metrics: Mapping[str, float]) -> bool:
        """Say whether any of some metrics belongs to the panel."""
        starts = tuple(metric[:-1] for metric in self.metrics if metric.endswith("/*"))
        return any(metric in metrics for metric in self.metrics) or any(name.startswith(starts) for name in metrics)

    def pick(self, known: Iterable[str]) -> list[str]:
        """Name the metrics of the panel in its order, with those that its stars stand for among the known ones."""
        names = sorted(known)
        picked: dict[str, None] = {}
        for metric in self.metrics:
            if metric.endswith("/*"):
                picked.update(dict.fromkeys(name for name in names if name.startswith(metric[:-1])))
            else:
                picked[metric] = None
        return list(picked)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The identity of a run, carried by the first record that a backend receives.

    A training that was resumed from a checkpoint names the run that had saved it in `resumed_from`, and in `resumed_at`
    the last step of each (model, optimizer) pair in that checkpoint.
    """

    run_id: str
    run_dir: str | None = None
    created: float = 0.0
    config: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    environment: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    resumed_from: str = ""
    resumed_at: Mapping[str, int] = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of elements between consecutive edges: one more edge than counts."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def drawable(self) -> bool:
        """Whether it has as many edges as it should, all of them finite."""
        return len(self.edges) == len(self.counts) + 1 > 1 and all(map(math.isfinite, self.edges))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One row for the trackers: the flat metrics of one step, its open issues, histograms and files.

    `step` is the value of the trackers' own axis `gradtrack/step`. `source` names the (model, optimizer) pair where
    there is more than one. `loss` is for gradtrack's own pages: the trackers have the loss from the training loop.
    `caveats` say, once for a run, what its numbers do not show, and why. A backend takes the parts that its tracker has
    a place for and leaves the others alone.
    """

    step: int
    time: float
    metrics: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    epoch: int | None = None
    loss: float | None = None
    source: str = ""
    run: RunInfo | None = None
    panels: tuple[Panel, ...] = ()
    issues: tuple[Mapping[str, Any], ...] = ()
    histograms: Mapping[str, Histogram] = field(default_factory=lambda: _NOTHING)
    files: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.step) is not int:
            raise InputTypeError(f"record step {self.step!r}: expected an int. Count optimizer steps.")
        if not -(2**63) <= self.step < 2**63:
            raise UsageError(f"record step {self.step!r}: expected a number of 64 bits. Count optimizer steps.")

    @property
    def tells_health(self) -> bool:
        """Whether `issues` holds all open issues: the record of a step's update comes one step later, without them."""
        return bool(self.issues) or not self.metrics or any(name.startswith(_HEALTHY) for name in self.metrics)

    @property
    def identity(self) -> Identity:
        """Return what distinguishes the records of one step: that of its gradients and that of its update."""
        return self.source, self.step, self.time, frozenset(self.metrics)


_FLOAT: Final = frozenset({float})
_TEXT: Final = frozenset({str})


def is_valid(metrics: Mapping[str, float]) -> bool:
    """Whether all metrics are plain floats under text names."""
    return _FLOAT.issuperset(map(type, metrics.values())) and _TEXT.issuperset(map(type, metrics)) and "" not in metrics


def validate(record: Record) -> tuple[Record, dict[str, str]]:
    """Return the record with its valid metrics as plain floats, and for every other name why it was dropped."""
    good: dict[str, float] = {}
    bad: dict[str, str] = {}
    metrics: Mapping[Any, Any] = record.metrics
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            bad[repr(name)] = "a name must be a text that is not empty"
        elif value is None or isinstance(value, (str, bytes, complex)):
            bad[name] = f"{value!r:.80} is not a number"
        else:
            try:
                good[str(name)] = float(value)
            except (TypeError, ValueError, OverflowError, RuntimeError) as fault:
                bad[name] = f"a {type(value).__name__} is not a number ({fault})"
    return dataclasses.replace(record, metrics=good), bad
