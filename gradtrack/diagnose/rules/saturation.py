"""Squashing functions at the ends of their range."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Final

from gradtrack.analyzers.base import OFTEN_EVERY
from gradtrack.diagnose.graph import FlowGraph
from gradtrack.diagnose.sample import Case, Sample, about_units, in_all, median
from gradtrack.measure.node import Node
from gradtrack.reports import Issue, IssueSeverity, IssueType

_SHARE: Final = 0.5
_FEW: Final = 0.1
_THROUGH: Final = 1 / 3
_SHAPED: Final = re.compile(
    r"(Unsafe)?(View|Unsqueeze|Squeeze|Expand|Reshape|Permute|Transpose|Slice|Alias|T|Mt)Backward"
)
_STEEPEST: Final = {"Tanh": 1.0, "Hardtanh": 1.0, "Sigmoid": 0.25, "Hardsigmoid": 1 / 6}
_SIGMOIDS: Final = ("SigmoidBackward0", "HardsigmoidBackward0")


@dataclass(slots=True)
class _Squashed:
    """How much of a layer is where its function is flat, and how much gradient comes through there."""

    share: float
    through: float
    arrived: float


@about_units
def judge(case: Case) -> list[Issue]:
    """Open where over half of the outputs of tanh or sigmoid are at the ends of their range, and stop the gradient.

    A function that has learned to be sure of most inputs is at its ends as well, but not for those that it has still to
    learn, which the gradient comes from: most of it gets through. Where less than a third does, the layers before are
    cut off. Silent where the loss has halved since the layer was within its range, and on a gate, which has made up its
    mind, and beside which the gradient passes through what it multiplies. The last function before the loss may
    saturate: that is certainty, and what training is for.
    """
    found = in_all([_seen_in(sample) for sample in case.recent])
    return [
        _issue(case, name, median(one.share for one in seen), through)
        for name, seen in found.items()
        if all(one.share > _SHARE for one in seen)
        and (through := _through(case, name)) < _THROUGH
        and not _was_learned(case, name)
    ]


def _seen_in(sample: Sample) -> dict[str, _Squashed]:
    return sample.remembered("squashed", lambda sample: dict(_squashed(sample.graph)))


def _through(case: Case, name: str) -> float:
    """Return the share of all gradient that came through since the layer is at the ends of its range.

    A batch that has something to teach sends more of it, and so counts for more, than one that has not.
    """
    arrived = passed = 0.0
    for sample in reversed(case.samples):
        seen = _seen_in(sample).get(name)
        if seen is None or not seen.share > _SHARE:
            break
        arrived += seen.arrived**2
        passed += (seen.arrived * seen.through) ** 2
    return math.sqrt(passed / arrived) if arrived > 0 else math.nan


def _was_learned(case: Case, name: str) -> bool:
    """Whether the loss has halved since the layer was last seen within the range of its function.

    Training takes it out of there by and by: nearly none and nearly all of it, a few steps apart, has another cause.
    """
    after = case.recent[0]
    for sample in reversed(case.samples[: -len(case.recent)]):
        seen = _seen_in(sample).get(name)
        if seen is not None and not seen.share > _SHARE:
            near = after.step - sample.step <= OFTEN_EVERY
            if near and seen.share < _FEW and _seen_in(after)[name].share > 1 - _FEW:
                return False
            return case.series.has_halved_since(sample.step)
        after = sample if seen is not None else after
    return False


def _squashed(graph: FlowGraph) -> Iterator[tuple[str, _Squashed]]:
    found: dict[str, list[_Squashed]] = {}
    for index, node in enumerate(graph.nodes):
        following = graph.after[index][0] if len(set(graph.after[index])) == 1 else ""
        inner = any(graph.nodes[child].parametric or graph.children[child] for child in graph.children[index])
        if node.kind == "RNN_TANH" or (_is_tanh(graph, index, following) and inner):
            found.setdefault(node.name, []).append(_seen(graph, index, node.beyond_tanh, node.slope_tanh))
        elif following in _SIGMOIDS and inner and not _is_gate(graph, index):
            found.setdefault(node.name, []).append(_seen(graph, index, node.beyond_sigmoid, node.slope_sigmoid))
    for name, calls in found.items():
        yield name, _Squashed(*(median(values) for values in zip(*(astuple(call) for call in calls), strict=True)))


def _is_tanh(graph: FlowGraph, index: int, following: str) -> bool:
    """Whether tanh follows, or what is made of lines like it, which only the name of a module tells from ReLU6."""
    if following != "HardtanhBackward0":
        return following == "TanhBackward0"
    after = _function(graph, index)
    return after is not None and after.kind == "Hardtanh"


def _seen(graph: FlowGraph, index: int, share: float, slope: float) -> _Squashed:
    """Measure the gradient on both sides of the function where it is a module; else go by the function's slopes."""
    node, after = graph.nodes[index], _function(graph, index)
    end = graph.nodes[graph.path(index)[-1]]
    if after is None or node.delta is None or not after.delta:
        return _Squashed(share, slope, end.delta or 0.0)
    return _Squashed(share, node.delta / after.delta / _STEEPEST[after.kind], after.delta)


def _function(graph: FlowGraph, index: int) -> Node | None:
    """Return the call of a squashing module that has nothing but the output of this call to do with."""
    children = graph.children[index]
    if len(children) != 1 or len(graph.nodes[children[0]].parents) != 1:
        return None
    after = graph.nodes[children[0]]
    return after if after.kind in _STEEPEST else None


def _is_gate(graph: FlowGraph, index: int) -> bool:
    """Whether all that a sigmoid does is to be multiplied with something."""
    children = graph.children[index]
    start = children[0] if len(children) == 1 and graph.nodes[children[0]].kind in ("Sigmoid", "Hardsigmoid") else index
    uses = [ops for child in graph.children[start] for parent, ops in graph.nodes[child].parents if parent == start]
    first = [next((op for op in ops if op not in _SIGMOIDS and not _SHAPED.match(op)), "") for ops in uses]
    return bool(first) and set(first) == {"MulBackward0"}


def _issue(case: Case, layer: str, share: float, through: float) -> Issue:
    return Issue(
        issue_type=IssueType.SATURATION,
        severity=IssueSeverity.HIGH,
        layer=layer,
        message=(
            f"{share:.0%} of the outputs behind {layer} are at the ends of their range, where the slope is near 0, and "
            f"{through:.0%} of the gradient gets through."
        ),
        statistic="saturated_share",
        value=share,
        threshold=_SHARE,
        window=len(case.recent),
        step=case.step,
        confidence=0.9,
        recommendation=f"Scale the weights of {layer} down, normalise its input, or put a LayerNorm behind it.",
    )
