"""Rectified units that no input reaches any more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradtrack.diagnose.graph import FlowGraph
from gradtrack.diagnose.sample import Case, about_units, in_all
from gradtrack.measure.node import Node
from gradtrack.reports import Issue, IssueSeverity, IssueType

_SHARE: Final = 0.5
_ROWS: Final = 32
_LUCK: Final = 3.7
_FAR: Final = 3.0
_FEW: Final = 8
_MANY: Final = 12
_CENTRED: Final = ("BatchNorm", "InstanceNorm")
_OFF: Final = {
    "ReluBackward0": 0.0,
    "HardtanhBackward0": 0.0,
    "ThresholdBackward0": 0.0,
    "HardswishBackward0": -3.0,
    "GeluBackward0": -5.0,
    "SiluBackward0": -14.0,
    "MishBackward0": -14.0,
    "EluBackward0": -14.0,
    "SoftplusBackward0": -14.0,
}
"""The pre-activation under which an activation function passes next to nothing."""


@dataclass(slots=True)
class _Range:
    """The pre-activations of a layer's units, over all inputs of a window."""

    limit: float
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    rows: int
    centred: bool

    def join(self, other: _Range) -> None:
        if other.low.shape == self.low.shape:
            self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
            self.rows += other.rows

    @property
    def off(self) -> NDArray[np.bool_]:
        return self.high <= self.limit


@about_units
def judge(case: Case) -> list[Issue]:
    """Open where over half of a layer's units, and more than luck explains, are off for all inputs of the last samples.

    A layer that is off because what feeds it is constant already is a consequence and not named. Where the input hardly
    varies, or in few directions as behind a narrow code, few units are on for one input and off for another; the rest
    is on or off by the luck of its weights, and only far more than half of it are a fault. A normalisation that
    centres every unit by itself leaves nothing to luck.
    """
    if not case.recent:
        return []
    *graphs, last = case.graphs
    suspects = {name: units for name, units in _ranges(last) if units.off.mean() > _SHARE}
    if not suspects:
        return []
    found = []
    for name, (whole, *others) in in_all([*(dict(_ranges(graph)) for graph in graphs), suspects]).items():
        for other in others:
            whole.join(other)
        if _is_dead(whole):
            found.append(_issue(case, name, whole.off))
    return found


def _is_dead(units: _Range) -> bool:
    off, count = units.off, len(units.off)
    if units.rows < _ROWS or count < 2 or not off.mean() > _SHARE:
        return False
    if units.centred or (count >= _MANY and off.all()):
        return True
    by_luck = _chance(units)
    if count >= _FEW and off.sum() > by_luck * count + _LUCK * math.sqrt(by_luck * (1 - by_luck) * count):
        return True
    far = units.high - units.limit < -_FAR * (units.high - units.low)
    return bool(off.all() and far.mean() > _SHARE)


def _chance(units: _Range) -> float:
    """Return how likely a sound unit is off for all inputs, by how many of the others are on for all of them.

    Being off and being as far on the other side for all inputs are as likely, so with c of the sound units crossing
    over, (1 - c) / 2 are off; and of those that are not off, (1 - c) / (1 + c) do not cross over.
    """
    on = ~units.off
    if not on.any():
        return 0.5
    always = float((units.low[on] >= -units.limit).mean())
    return always / (1 + always)


def _ranges(graph: FlowGraph) -> Iterator[tuple[str, _Range]]:
    """Return for every layer that feeds rectifiers only the ranges of its units, over all of its calls."""
    calls: dict[str, _Range] = {}
    for index, node in enumerate(graph.nodes):
        limit = _limit(graph, index)
        if limit is None or node.unit_max is None or node.unit_min is None or not _has_input(graph, node):
            continue
        found = _Range(limit, node.unit_min, node.unit_max, node.rows, node.kind.startswith(_CENTRED))
        if node.name in calls:
            calls[node.name].join(found)
        else:
            calls[node.name] = found
    yield from calls.items()


def _limit(graph: FlowGraph, index: int) -> float | None:
    following = set(graph.after[index])
    return _OFF.get(following.pop()) if len(following) == 1 else None


def _has_input(graph: FlowGraph, node: Node) -> bool:
    return not node.parents or any(graph.nodes[parent].varies for parent, _ in node.parents)


def _issue(case: Case, layer: str, off: NDArray[np.bool_]) -> Issue:
    share, count = float(off.mean()), int(off.sum())
    return Issue(
        issue_type=IssueType.DEAD,
        severity=IssueSeverity.HIGH,
        layer=layer,
        message=f"{count} of the {len(off)} units of {layer} have been off for every input of the last samples.",
        statistic="units_off",
        value=share,
        threshold=_SHARE,
        window=len(case.recent),
        step=case.step,
        confidence=0.95,
        recommendation=(
            f"Re-initialise {layer} with a bias of 0, lower the learning rate, or use LeakyReLU or GELU: "
            "units that are off for every input get no gradient to come back by."
        ),
    )
