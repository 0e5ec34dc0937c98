"""Rules about single units: those that are dead, those that are saturated, and those that are all the same."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradtrack.analyzers.base import OFTEN_EVERY
from gradtrack.analyzers.flow.call import Node
from gradtrack.analyzers.flow.graph import FlowGraph
from gradtrack.analyzers.flow.samples import Case, Sample, in_all, median
from gradtrack.reports import Issue, IssueType
from gradtrack.support.names import module_of

_DEAD_SHARE: Final = 0.5
_ROWS: Final = 32
_LUCK: Final = 3.7
_FAR: Final = 3.0
_DEAD_FEW: Final = 8
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


def judge_dead(case: Case) -> Iterator[Issue]:
    """Open where over half of a layer's units, and more than luck explains, are off for all inputs of the last samples.

    A layer that is off because what feeds it is constant already is a consequence and not named. Where the input hardly
    varies, or in few directions as behind a narrow code, few units are on for one input and off for another; the rest
    is on or off by the luck of its weights, and only far more than half of it are a fault. A normalisation that
    centres every unit by itself leaves nothing to luck. A layer that was dead in the window before is so while over
    half of its units are off.
    """
    if not case.recent:
        return
    known = {issue.layer for issue in case.standing if issue.issue_type is IssueType.DEAD}
    *graphs, last = case.graphs
    suspects = {name: units for name, units in _ranges(last).items() if units.off.mean() > _DEAD_SHARE}
    if not suspects:
        return
    for layer, (whole, *others) in in_all([*map(_ranges, graphs), suspects]).items():
        for other in others:
            whole.join(other)
        if (layer in known and whole.off.mean() > _DEAD_SHARE) or _is_dead(whole):
            yield case.issue(
                IssueType.DEAD,
                layer,
                ("units_off", float(whole.off.mean()), _DEAD_SHARE),
                (
                    f"{int(whole.off.sum())} of the {len(whole.off)} units of {layer} have been off for every input of "
                    "the last samples."
                ),
                (
                    f"Re-initialise {layer} with a bias of 0, lower the learning rate, or use LeakyReLU or GELU: "
                    "units that are off for every input get no gradient to come back by."
                ),
            )


def _is_dead(units: _Range) -> bool:
    off, count = units.off, len(units.off)
    if units.rows < _ROWS or count < 2 or not off.mean() > _DEAD_SHARE:
        return False
    if units.centred or (count >= _MANY and off.all()):
        return True
    by_luck = _chance(units)
    if count >= _DEAD_FEW and off.sum() > by_luck * count + _LUCK * math.sqrt(by_luck * (1 - by_luck) * count):
        return True
    far = units.high - units.limit < -_FAR * (units.high - units.low)
    return bool(off.all() and far.mean() > _DEAD_SHARE)


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


def _ranges(graph: FlowGraph) -> dict[str, _Range]:
    """Return for every layer that feeds rectifiers only the ranges of its units, over all of its calls."""
    calls: dict[str, _Range] = {}
    for index, node in enumerate(graph.nodes):
        limit = _limit(graph, index)
        if limit is None or node.unit_max is None or node.unit_min is None or not _has_input(graph, node):
            continue
        found = _Range(limit, node.unit_min, node.unit_max, node.rows, node.kind.startswith(_CENTRED))
        calls.setdefault(node.name, found)
        if calls[node.name] is not found:
            calls[node.name].join(found)
    return calls


def _limit(graph: FlowGraph, index: int) -> float | None:
    following = set(graph.after[index])
    return _OFF.get(following.pop()) if len(following) == 1 else None


def _has_input(graph: FlowGraph, node: Node) -> bool:
    return not node.parents or any(graph.nodes[parent].varies for parent, _ in node.parents)


_SATURATION_SHARE: Final = 0.5
_SATURATION_FEW: Final = 0.1
_THROUGH: Final = 1 / 3
_SHAPED: Final = re.compile(
    r"(Unsafe)?(View|Unsqueeze|Squeeze|Expand|Reshape|Permute|Transpose|Slice|Alias|T|Mt)Backward"
)
_STEEPEST: Final = {"Tanh": 1.0, "Hardtanh": 1.0, "Sigmoid": 0.25, "Hardsigmoid": 1 / 6}
_SIGMOIDS: Final = ("SigmoidBackward0", "HardsigmoidBackward0")


class _Squashed(NamedTuple):
    """How much of a layer is where its function is flat, and how much gradient comes through there."""

    share: float
    through: float
    arrived: float


def judge_saturation(case: Case) -> Iterator[Issue]:
    """Open where over half of the outputs of tanh or sigmoid are at the ends of their range, and stop the gradient.

    A function that has learned to be sure of most inputs is at its ends as well, but not for those that it has still to
    learn, which the gradient comes from: most of it gets through. Where less than a third does, the layers before are
    cut off. Silent where the loss has halved since the layer was within its range, and on a gate, which has made up its
    mind, and beside which the gradient passes through what it multiplies. The last function before the loss may
    saturate: that is certainty, and what training is for.
    """
    for layer, seen in in_all([_seen_in(sample) for sample in case.recent]).items():
        if not all(one.share > _SATURATION_SHARE for one in seen):
            continue
        share, through = median(one.share for one in seen), _through(case, layer)
        if through < _THROUGH and not _was_learned(case, layer):
            yield case.issue(
                IssueType.SATURATION,
                layer,
                ("saturated_share", share, _SATURATION_SHARE),
                (
                    f"{share:.0%} of the outputs behind {layer} are at the ends of their range, where the slope is "
                    f"near 0, and {through:.0%} of the gradient gets through."
                ),
                f"Scale the weights of {layer} down, normalise its input, or put a LayerNorm behind it.",
            )


def _seen_in(sample: Sample) -> dict[str, _Squashed]:
    return sample.remembered("squashed", lambda sample: _squashed(sample.graph))


def _through(case: Case, name: str) -> float:
    """Return the share of all gradient that came through since the layer is at the ends of its range.

    A batch that has something to teach sends more of it, and so counts for more, than one that has not.
    """
    arrived = passed = 0.0
    for sample in reversed(case.samples):
        seen = _seen_in(sample).get(name)
        if seen is None or not seen.share > _SATURATION_SHARE:
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
        if seen is not None and not seen.share > _SATURATION_SHARE:
            near = after.step - sample.step <= OFTEN_EVERY
            if near and seen.share < _SATURATION_FEW and _seen_in(after)[name].share > 1 - _SATURATION_FEW:
                return False
            return case.series.has_halved_since(sample.step)
        after = sample if seen is not None else after
    return False


def _squashed(graph: FlowGraph) -> dict[str, _Squashed]:
    found: dict[str, list[_Squashed]] = {}
    for index, node in enumerate(graph.nodes):
        following = graph.after[index][0] if len(set(graph.after[index])) == 1 else ""
        inner = any(graph.nodes[child].parametric or graph.children[child] for child in graph.children[index])
        if node.kind == "RNN_TANH" or (_is_tanh(graph, index, following) and inner):
            found.setdefault(node.name, []).append(_seen(graph, index, node.beyond_tanh, node.slope_tanh))
        elif following in _SIGMOIDS and inner and not _is_gate(graph, index):
            found.setdefault(node.name, []).append(_seen(graph, index, node.beyond_sigmoid, node.slope_sigmoid))
    return {name: _Squashed(*map(median, zip(*calls, strict=True))) for name, calls in found.items()}


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


def judge_equal_units(case: Case) -> Iterator[Issue]:
    """Open where the units of a layer have equal weights and equal gradients, and so stay equal whatever is learned.

    Weights that all begin with one number, as zeros or a constant, do so, unless what comes after tells them apart: the
    classes of a head have gradients of their own, and a last layer of zeros is moved by its first step.
    """
    seen = case.recent
    names = (
        [name for name in case.samples[-1].params if all(_is_alike(sample, name) for sample in seen)] if seen else []
    )
    if not names:
        return
    zero = case.samples[-1].params[names[0]].weight == 0
    others = f" {len(names) - 1} more are so." if len(names) > 1 else ""
    yield case.issue(
        IssueType.EQUAL_UNITS,
        module_of(names[0]),
        ("units_that_differ", 0.0, 0.0),
        (
            f"{names[0]} is zero and its gradient as well: nothing moves it.{others}"
            if zero
            else f"All units of {names[0]} have the same weights and the same gradient: they are one unit.{others}"
        ),
        "Initialise the weights at random, as the layers of torch do by themselves; only one factor of a product may "
        "begin at zero.",
    )


def judge_copies(case: Case) -> Iterator[Issue]:
    """Open where a matrix has the weights and the gradient of another one, and so stays equal to it for ever.

    Heads or critics that were copied do so. Equal norms of both, in each of the last samples, tell it: two matrices
    that differ have one of these norms in common by design, and never both by chance.
    """
    first, *others = [sample.remembered("copies", _copies) for sample in case.recent] or [{}]
    names = [name for name, of in first.items() if all(found.get(name) == of for found in others)]
    if not names:
        return
    more = f" {len(names) - 1} more are so." if len(names) > 1 else ""
    yield case.issue(
        IssueType.EQUAL_UNITS,
        module_of(names[0]),
        ("matrices_that_differ", 0.0, 0.0),
        f"{names[0]} has the weights and the gradient of {first[names[0]]}: the two are one.{more}",
        "Initialise each at random: copies that are used alike get the same gradients and never differ.",
    )


def _copies(sample: Sample) -> dict[str, str]:
    """Return the matrices that have both norms in common with an earlier one, each with that one."""
    known: dict[tuple[object, ...], str] = {}
    found = {}
    for name, param in sample.params.items():
        if param.ndim > 1 and param.norm > 0 and param.weight > 0 and math.isfinite(param.norm + param.weight):
            key = (param.ndim, param.count, f"{param.norm:.6e}", f"{param.weight:.6e}")
            if (first := known.setdefault(key, name)) != name:
                found[name] = first
    return found


def _is_alike(sample: Sample, name: str) -> bool:
    param = sample.params.get(name)
    return param is not None and param.alike and param.owned is not False
