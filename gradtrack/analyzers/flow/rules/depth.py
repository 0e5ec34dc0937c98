"""Rules about depth: gradients that shrink or grow from layer to layer, and layers that let little through."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from gradtrack.analyzers.flow.call import Node
from gradtrack.analyzers.flow.graph import FlowGraph
from gradtrack.analyzers.flow.samples import Case, Sample, in_all, median
from gradtrack.reports import Issue, IssueSeverity, IssueType
from gradtrack.support.names import module_of

_SMALL: Final = 1e-3
_LARGE: Final = 100.0
_GROWN: Final = 1.2
_SAMPLES: Final = 2
_RECOVERED: Final = 3.0
_LONG: Final = 8


def judge_depth(case: Case) -> list[Issue]:
    """Open where the first layer's gradient is under 1e-3 of the last one's, or any layer's is over 100 times it.

    Healthy models of all kinds stay between 5e-3 and 50. What layers and gains take that began at zero does not count,
    as the second factor of a low-rank adapter or the gain of a residual branch do. Silent where a single layer takes
    all of it that is only growing from next to zero, as a head may, and where a large gain came with a falling loss, as
    it does when targets are large, or is that of a normalisation right behind.
    """
    graphs = [sample.graph for sample in case.samples[-_SAMPLES:]]
    entries = set.intersection(*(set(graph.paths) for graph in graphs)) if len(graphs) == _SAMPLES else ()
    worst: dict[IssueType, Issue] = {}
    for issue in filter(None, (_entry(case, graphs, entry) for entry in sorted(entries))):
        known = worst.get(issue.issue_type)
        if known is None or abs(math.log(issue.value or 1)) > abs(math.log(known.value or 1)):
            worst[issue.issue_type] = issue
    return list(worst.values())


def _entry(case: Case, graphs: list[FlowGraph], entry: str) -> Issue | None:
    series = [graph.gammas(graph.paths[entry]) for graph in graphs]
    if any(len(gammas) < 2 for gammas in series):
        return None
    num_layers, turns = len(series[-1]) - 1, graphs[-1].turns(graphs[-1].paths[entry])
    first = [
        gammas[entry] * _fewer_rows(graph, entry) / _taken_by(case.began_at_zero, gammas)
        for gammas, graph in zip(series, graphs, strict=True)
    ]
    ratio = median(first)
    if ratio > 0 and max(first) < _SMALL and not _begins_at_zero(case, series[-1]):
        return _depth_issue(case, IssueType.VANISHING, entry, ratio, num_layers, turns)
    # where an output is normalised at once, the gradient there goes by how small that output is
    series = [
        {name: gamma for name, gamma in gammas.items() if name not in graph.normalised}
        for gammas, graph in zip(series, graphs, strict=True)
    ]
    peaks = [max(gammas.values(), default=0.0) for gammas in series]
    if min(peaks) > _LARGE and not _is_learned(case, entry):
        layer = max(series[-1], key=lambda name: series[-1][name])
        return _depth_issue(case, IssueType.EXPLODING, layer, median(peaks), num_layers, turns)
    return None


def _fewer_rows(graph: FlowGraph, entry: str) -> float:
    """Return by what to multiply the gradient of a layer that only a part of the batch is sent to, as an expert is."""
    path = graph.paths[entry]
    first, last = graph.nodes[path[0]].rows, graph.nodes[path[-1]].rows
    return math.sqrt(last / first) if 0 < first < last else 1.0


def _taken_by(modules: set[str], gammas: dict[str, float]) -> float:
    """Return the part of the fall at some modules: at layers of the path, and where the path leaves blocks."""
    fall = 1.0
    for before, after in pairwise(gammas) if modules else ():
        left = any(f"{before}.".startswith(f"{name}.") > f"{after}.".startswith(f"{name}.") for name in modules)
        if (after in modules or left) and 0 < gammas[before] < gammas[after]:
            fall *= gammas[before] / gammas[after]
    return fall


def has_recovered(case: Case, entry: str) -> bool:
    """Whether the gradient at a layer, which had vanished, has long been clearly above the limit again."""
    graphs = [sample.graph for sample in case.samples[-_LONG:]]
    return len(graphs) == _LONG and all(
        entry in graph.paths and graph.gammas(graph.paths[entry]).get(entry, 0.0) > _RECOVERED * _SMALL
        for graph in graphs
    )


def _is_learned(case: Case, entry: str) -> bool:
    """Whether the gain was ordinary at first and the loss has come down since."""
    graph = next((sample for sample in case.samples if sample.nodes), case.samples[0]).graph
    before = graph.gammas(graph.paths[entry]) if entry in graph.paths else {}
    return case.trend.learned and max(before.values(), default=math.inf) < _LARGE


def _begins_at_zero(case: Case, gammas: dict[str, float]) -> bool:
    """Whether the steepest of the layers explains the fall by itself and its weight is still growing from zero."""
    names = list(gammas)
    steps = pairwise(names)
    falls = {after: gammas[before] / gammas[after] for before, after in steps if gammas[after] > 0}
    steepest = min(falls, key=lambda name: falls[name])
    if not falls[steepest] > 0 or gammas[names[0]] / falls[steepest] < _SMALL:
        return False
    first, last = case.samples[0].params, case.samples[-1].params
    weights = [name for name in last if name.startswith(f"{steepest}.") and last[name].ndim > 1 and name in first]
    return any(last[name].weight > _GROWN * first[name].weight for name in weights)


def _depth_issue(
    case: Case, kind: IssueType, layer: str, ratio: float, num_layers: int, turns: tuple[str, int]
) -> Issue:
    """Report a gradient that came through layers, or through the calls of a cell that feeds itself."""
    cell, num_calls = turns
    between = f"{num_calls} calls of {cell} (time steps)" if cell else f"{num_layers} layers"
    per_one = ratio ** (1 / max(1, num_calls if cell else num_layers))
    small = kind is IssueType.VANISHING
    return case.issue(
        kind,
        layer,
        ("gradient_over_last_layer", ratio, _SMALL if small else _LARGE),
        (
            f"The gradient at {layer} is {ratio:.2g} {'of' if small else 'times'} what reaches the last layer: a "
            f"factor of {per_one:.2g} for each of the {between} in between."
        ),
        (
            f"Initialise for a gain near 1 per {'time step' if cell else 'layer'} (multiply the weights "
            f"{f'of {cell} ' if cell else ''}by {1 / per_one:.2g}), or add "
            f"{'gates' if cell else 'normalisation or skip connections'}."
        ),
        window=_SAMPLES,
    )


_SHARE: Final = 0.3
_WIDE: Final = 8


def judge_bottleneck(case: Case) -> Iterator[Issue]:
    """Open where one layer that everything passes lets under 0.3 of the rank through that arrives from the loss.

    A narrow layer of more than one unit is a choice of the design, as in an autoencoder; one unit, or a wide layer
    that passes as little as a narrow one, is not. Nor is one unit that takes in no more than one, as a normalisation
    of a single channel does; nor what the loss has halved with.
    """
    if case.series.has_halved:
        return
    necks = in_all([sample.remembered("necks", lambda sample: dict(_necks(sample))) for sample in case.recent])
    for layer, found in list(necks.items())[-1:]:
        rank, last = (median(values) for values in zip(*found, strict=True))
        yield case.issue(
            IssueType.BOTTLENECK,
            layer,
            ("rank_over_last_layer", rank / last, _SHARE),
            f"The gradient behind {layer} has an effective rank of {rank:.2g}, the last layer's one of {last:.2g}.",
            f"Give {layer} a rank of at least {max(2, round(last))}, or lead a skip connection around it.",
            severity=IssueSeverity.MEDIUM,
        )


def _takes_in(sample: Sample, layer: str) -> float:
    """Return how many inputs each unit of a layer sums up: one where it has no matrix."""
    matrices = [param.count for name, param in sample.params.items() if module_of(name) == layer and param.ndim > 1]
    return max(matrices, default=1)


def _necks(sample: Sample) -> Iterator[tuple[str, tuple[float, float]]]:
    """Return the layers before which the rank of the gradient falls at once, going back from the loss.

    With each come that rank and the last layer's.
    """
    graph = sample.graph
    for path in graph.paths.values():
        nodes = [graph.nodes[index] for index in path]
        last = next((node.effective_rank for node in reversed(nodes) if node.parametric), math.nan)
        layer = nodes[0]
        for before, after in pairwise(nodes):
            layer = before if before.parametric else layer
            wide = after.parametric and min(before.width, after.width) >= _WIDE
            if (before.width == 1 or wide) and _is_narrow(before, after, last):
                neck = layer if before.width == 1 else after
                if graph.separates(neck.name, path) and (neck.width > 1 or _takes_in(sample, neck.name) > 1):
                    yield neck.name, (before.effective_rank, last)


def _is_narrow(before: Node, after: Node, last: float) -> bool:
    if before.least_rank >= _SHARE * last:
        return False
    return before.effective_rank < _SHARE * min(last, after.effective_rank)
