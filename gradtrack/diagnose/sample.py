"""What one sampled step shows, and the run of them that the rules judge."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from gradtrack.analyzers.base import Series
from gradtrack.diagnose.graph import FlowGraph
from gradtrack.diagnose.trend import Trend
from gradtrack.measure.elements import Change
from gradtrack.measure.probe import Node
from gradtrack.reports import Issue

KEPT_WINDOWS: Final = 16
_FEWEST: Final = 2
RECENT: Final = 3
"""How many of the last samples a state must be seen in: a fault of the last ten steps of a short run shows in three."""


@dataclass(slots=True)
class ParameterSample:
    """A parameter on a sampled step; `owned` is None where no optimizer is known."""

    norm: float
    weight: float
    ndim: int
    count: int
    owned: bool | None
    has_grad: bool
    zeros: float = 0.0
    coarse: bool = False

    @property
    def relative(self) -> float:
        """Return ‖g‖/‖w‖."""
        return self.norm / self.weight if self.weight > 0 else math.nan


@dataclass
class Sample:
    """One sampled step: the flow through the modules, the parameters, and what the optimizer step then did."""

    step: int
    nodes: list[Node]
    params: dict[str, ParameterSample]
    without_grad: set[str] = field(default_factory=set)
    stale: list[str] = field(default_factory=list)
    lr: float = math.nan
    skipped: bool = False
    changes: dict[str, Change] | None = None
    cosine: float = math.nan
    clip: float = math.nan

    @cached_property
    def graph(self) -> FlowGraph:
        """Return the way of the gradient through the modules."""
        return FlowGraph(self.nodes)

    @property
    def ratios(self) -> dict[str, float]:
        """Return ‖Δw‖/‖w‖ of every weight with a gradient and an optimizer; of vectors where there is nothing else."""
        flat = all(param.ndim < 2 for param in self.params.values())
        found = {}
        for name, change in (self.changes or {}).items():
            param = self.params.get(name)
            if param is not None and param.owned and param.norm > 0 and (flat or param.ndim > 1):
                found[name] = change.ratio
        return {name: ratio for name, ratio in found.items() if not math.isnan(ratio)}


class Case:
    """A run as the rules see it: the plain numbers of every step, and the samples of some."""

    def __init__(self, series: Series, samples: Sequence[Sample]) -> None:
        self.series, self.samples = series, list(samples)

    @property
    def step(self) -> int:
        """Return the step of the last sample."""
        return self.samples[-1].step if self.samples else 0

    @cached_property
    def windows(self) -> list[Case]:
        """Return the run as it was after each of the last samples."""
        last = len(self.samples)
        return [Case(self.series, self.samples[:end]) for end in range(max(_FEWEST, last - KEPT_WINDOWS), last + 1)]

    @cached_property
    def recent(self) -> list[Sample]:
        """Return the last samples, or nothing while there are too few to judge a state by."""
        return self.samples[-RECENT:] if len(self.samples) >= RECENT else []

    @property
    def graphs(self) -> list[FlowGraph]:
        """Return the graph of each recent sample."""
        return [sample.graph for sample in self.recent]

    def last_graphs(self, count: int) -> list[FlowGraph]:
        """Return the graphs of the last samples, or nothing while there are fewer."""
        return [sample.graph for sample in self.samples[-count:]] if len(self.samples) >= count else []

    @cached_property
    def moved(self) -> list[Sample]:
        """Return the samples whose optimizer step was seen, oldest first."""
        return [sample for sample in self.samples if sample.changes and not sample.skipped]

    @cached_property
    def trend(self) -> Trend:
        """Return which way the loss goes."""
        return Trend(self.series.first_losses, self.series.losses)


def median(values: Iterable[float]) -> float:
    """Return the median of those values that are numbers, NaN where there are none."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def module_of(parameter: str) -> str:
    """Return the module that a parameter belongs to."""
    return parameter.rpartition(".")[0] or parameter


Judge = Callable[[Case], list[Issue]]


def windowed(judge: Judge) -> Judge:
    """Mark a rule that is about a state of the model, and so about every window of samples."""
    judge.windowed = True  # type: ignore[attr-defined]
    return judge
