"""Samples of the gradient flow, the case that the rules judge with the trend of its loss, and samples as plain data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np

from gradtrack.analyzers.base import Series
from gradtrack.analyzers.flow.call import Node
from gradtrack.analyzers.flow.graph import FlowGraph
from gradtrack.analyzers.flow.sampled_weights import Change
from gradtrack.reports import Issue, IssueType
from gradtrack.support.names import module_of

Seen = TypeVar("Seen")

KEPT_WINDOWS: Final = 16
_LONG: Final = 100
_NOT_LEARNED: Final = 0.95
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
    alike: bool = False
    """Whether the units of a matrix have all the same weights and the same gradient, or no weights and no gradient."""

    @property
    def relative(self) -> float:
        """Return ‖g‖/‖w‖."""
        return self.norm / self.weight if self.weight > 0 else math.nan


@dataclass
class Sample:
    """One sampled step: the flow through the modules, the parameters, and what the optimizer step then did.

    Where it is `scaled`, a loss scaler decides whether the optimizer steps. `cosine` is that with the gradient of the
    next step, `turned` the least with the gradients of the last samples.
    """

    step: int
    nodes: list[Node]
    params: dict[str, ParameterSample]
    without_grad: set[str] = field(default_factory=set)
    stale: list[str] = field(default_factory=list)
    lr: float = math.nan
    loss: float = math.nan
    skipped: bool = False
    scaled: bool = False
    changes: dict[str, Change] | None = None
    cosine: float = math.nan
    turned: float = math.nan
    clip: float = math.nan
    lowest_lr: float = math.nan
    training: bool = True
    """Whether the model was in training mode, and below which of its parts that depend on that were so."""
    in_training: list[str] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)
    """The normalisations in evaluation mode that have never seen a batch in training."""

    def remembered(self, what: Hashable, see: Callable[[Sample], Seen]) -> Seen:
        """Return what a rule computes from this sample, once for all the windows that hold it."""
        if what not in self._remembered:
            self._remembered[what] = see(self)
        found: Seen = self._remembered[what]
        return found

    @cached_property
    def _remembered(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def graph(self) -> FlowGraph:
        """Return the way of the gradient through the modules."""
        return FlowGraph(self.nodes)

    @cached_property
    def ratios(self) -> dict[str, float]:
        """Return ‖Δw‖/‖w‖ of every weight with a gradient and an optimizer; of vectors where there is nothing else.

        It is asked for once the optimizer step was seen.
        """
        flat = all(param.ndim < 2 for param in self.params.values())
        found = {}
        for name, change in (self.changes or {}).items():
            param = self.params.get(name)
            if param is not None and param.owned and param.norm > 0 and (flat or param.ndim > 1):
                found[name] = change.ratio
        return {name: ratio for name, ratio in found.items() if not math.isnan(ratio)}

    @cached_property
    def largest(self) -> float:
        """Return the largest of the ratios, 0 without any."""
        return max(self.ratios.values(), default=0.0)

    @property
    def sensitivity(self) -> float:
        """Return ‖g‖‖w‖/|loss|: by how much of itself the loss would change if the weights did by all of theirs."""
        return self._slope(param.weight for param in self.params.values())

    @cached_property
    def promised(self) -> float:
        """Return ‖g‖‖Δw‖/|loss|: which share of the loss the slope promises a step at the most."""
        moves = self.changes or {}
        known = [(param.weight, moves[name].ratio) for name, param in self.params.items() if name in moves]
        return self._slope(weight * ratio for weight, ratio in known if not math.isnan(ratio))

    def _slope(self, lengths: Iterable[float]) -> float:
        if not abs(self.loss) > 0:
            return math.nan
        grad = math.hypot(*(param.norm for param in self.params.values()))
        return grad * math.hypot(*lengths) / abs(self.loss)


@dataclass
class Case:
    """A run as the rules see it: the plain numbers of every step, the samples of some, and verdicts given before.

    `from_start` are the keys of those of the verdicts that the first window gave already.
    """

    series: Series
    samples: Sequence[Sample]
    standing: Sequence[Issue] = ()
    from_start: Collection[str] = ()

    @property
    def step(self) -> int:
        """Return the step of the last sample."""
        return self.samples[-1].step if self.samples else 0

    def issue(
        self, kind: IssueType, layer: str, measured: tuple[str, float, float], message: str, advice: str, **rest: Any
    ) -> Issue:
        """Make an issue, by default of the recent samples at the last step; see `Issue.found`."""
        return Issue.found(
            kind, layer, measured, message, advice, **{"window": len(self.recent), "step": self.step} | rest
        )

    @cached_property
    def windows(self) -> list[Case]:
        """Return the run as it was after each of the last samples, with the verdicts that stand now."""
        last = len(self.samples)
        found = [
            Case(self.series, self.samples[:end], self.standing, self.from_start)
            for end in range(max(_FEWEST, last - KEPT_WINDOWS), last + 1)
        ]
        for case in found:
            case.trend = self.trend  # which is about the whole run, and costs more than all the rest
        return found

    @cached_property
    def recent(self) -> list[Sample]:
        """Return the last samples, or nothing while there are too few to judge a state by."""
        return list(self.samples[-RECENT:]) if len(self.samples) >= RECENT else []

    @cached_property
    def began_at_zero(self) -> set[str]:
        """Return the modules whose weight began at zero, or a gain of their own, as those of adapters do by design."""
        zero = {name: param for name, param in self.samples[0].params.items() if param.weight == 0}
        gains = (name for name, param in zero.items() if param.ndim < 2 or name.endswith(".weight"))
        return {module_of(name) for name in gains if not name.endswith("bias")}

    @property
    def before(self) -> int | None:
        """Return the step of the last sample before the recent ones; None where they are the first."""
        return self.samples[-RECENT - 1].step if len(self.samples) > RECENT + 1 else None

    @property
    def graphs(self) -> list[FlowGraph]:
        """Return the graph of each recent sample."""
        return [sample.graph for sample in self.recent]

    @cached_property
    def moved(self) -> list[Sample]:
        """Return the samples whose optimizer step was seen, oldest first."""
        return [sample for sample in self.samples if sample.changes and not sample.skipped]

    @cached_property
    def is_stuck(self) -> bool:
        """Whether a hundred steps and more have not brought down a loss that keeps its sign by a twentieth."""
        return self.series.num_steps >= _LONG and self.trend.tells and self.trend.remaining > _NOT_LEARNED

    @cached_property
    def trend(self) -> Trend:
        """Return which way the loss goes."""
        return Trend(self.series.first_losses, self.series.losses)


_SIGNIFICANT: Final = 2.0
_MIN_STEPS: Final = 8
_LATEST: Final = 16


class Trend:
    """The trend of a series of losses: its end compared with its beginning, whatever their scale and sign."""

    def __init__(self, first: Sequence[float], last: Iterable[float]) -> None:
        self.losses = list(last)
        self.first = list(first)
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        self.known = len(finite) >= _MIN_STEPS
        latest = self.losses[-_LATEST:]
        self.diverged = 4 * sum(not math.isfinite(loss) for loss in latest) > len(latest)
        """Whether the loss is no number any more; a bad batch now and then is no trend."""
        width = max(4, len(finite) // 4)
        self._head = [loss for loss in self.first[: max(4, min(len(self.first), width))] if math.isfinite(loss)]
        self._finite, self._tail = finite, finite[-width:]

    @cached_property
    def noise(self) -> float:
        """Return the standard deviation from step to step."""
        return _noise(self._finite)

    @property
    def fall(self) -> float:
        """Return how far the loss has come down, in standard errors of the difference; negative where it went up."""
        if not self.known or not self._head or self.diverged:
            return 0.0 if not self.diverged else -math.inf
        difference = statistics.fmean(self._head) - statistics.fmean(self._tail)
        error = self.noise * math.sqrt(1 / len(self._head) + 1 / len(self._tail))
        if error == 0:
            return math.copysign(math.inf, difference) if difference else 0.0
        return difference / error

    @property
    def falling(self) -> bool:
        """Whether the loss has come down by more than its noise."""
        return self.fall > _SIGNIFICANT

    @property
    def rising(self) -> bool:
        """Whether the loss has gone up by more than its noise, or is no number any more."""
        return self.fall < -_SIGNIFICANT

    @cached_property
    def learned(self) -> bool:
        """Whether the loss has come down below where it began, whatever it did in between."""
        if not self.known or not self.first or self.diverged:
            return False
        begin, end = self.first[0], statistics.fmean(self._tail)
        return end < begin - 0.02 * abs(begin) and end < begin - 2 * self.noise / math.sqrt(len(self._tail))

    @cached_property
    def risen(self) -> bool:
        """Whether the loss is clearly worse than where it began, or is no number any more."""
        if self.diverged:
            return True
        if not self.known or not self.first or not self.first[0] > 0:
            return False
        begin, end = self.first[0], statistics.median(self._tail)
        return end > 1.5 * begin and sum(loss > begin for loss in self._tail) >= 0.8 * len(self._tail)

    @cached_property
    def tells(self) -> bool:
        """Whether the loss keeps its sign, so that its going down is what training is for."""
        return not self._finite or min(self._finite) >= 0 or max(self._finite) <= 0

    @property
    def turning(self) -> bool:
        """Whether the loss has been going up lately: the end of its last half above the beginning of it."""
        half = self.losses[-max(_MIN_STEPS, len(self.losses) // 2) :]
        return Trend(half, half).rising

    @property
    def remaining(self) -> float:
        """Return the loss at the end over that at the beginning; 1 where it is unknown or changes sign."""
        if not self.known or not self._head:
            return 1.0
        head, tail = statistics.median(self._head), statistics.median(self._tail)
        return tail / head if head > 0 and tail > 0 else 1.0


def _noise(losses: Sequence[float]) -> float:
    """Return the noise of losses: the standard deviation from step to step, robust against a trend."""
    steps = [after - before for before, after in pairwise(losses)]
    if not steps:
        return 0.0
    return 1.4826 * statistics.median(abs(step) for step in steps) / math.sqrt(2)


def median(values: Iterable[float]) -> float:
    """Return the median of those values that are numbers, NaN where there are none."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def in_all(windows: Sequence[Mapping[str, Seen]]) -> dict[str, list[Seen]]:
    """Return what each name stands for in every window, of those that all of them have."""
    names = windows[-1] if windows else {}
    return {name: [found[name] for found in windows] for name in names if all(name in found for found in windows)}


_UNITS: Final = ("unit_min", "unit_max")


def pack(sample: Sample) -> dict[str, Any]:
    """Return a sample as plain data."""
    for node in sample.nodes:
        node.rank = node.effective_rank
    plain = asdict(sample)
    for node in plain["nodes"]:
        units = {name: None if node[name] is None else node[name].tolist() for name in _UNITS}
        node |= units | {"parents": [[index, list(ops)] for index, ops in node["parents"]]}
    return plain | {"without_grad": sorted(sample.without_grad)}


def unpack(state: Mapping[str, Any]) -> Sample:
    """Return the sample that was packed."""
    changes = state["changes"]
    found = {
        "nodes": [_unpack_node(node) for node in state["nodes"]],
        "params": {name: ParameterSample(**param) for name, param in state["params"].items()},
        "without_grad": set(state["without_grad"]),
        "changes": None if changes is None else {name: Change(**change) for name, change in changes.items()},
    }
    return Sample(**{**state, **found})


def _unpack_node(state: Mapping[str, Any]) -> Node:
    units = {name: None if state[name] is None else np.array(state[name], dtype=np.float64) for name in _UNITS}
    return Node(**{**state, **units, "parents": [(index, tuple(ops)) for index, ops in state["parents"]]})
