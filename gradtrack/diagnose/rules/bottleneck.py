"""A layer through which less passes back than the loss sends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from gradtrack.diagnose.graph import FlowGraph
from gradtrack.diagnose.sample import Case, Sample, about_units, in_all, median, module_of
from gradtrack.measure.node import Node
from gradtrack.reports import Issue, IssueSeverity, IssueType

_SHARE: Final = 0.3
_WIDE: Final = 8


@dataclass(slots=True)
class _Neck:
    layer: str
    width: int
    rank: float
    last: float


@about_units
def judge(case: Case) -> list[Issue]:
    """Open where one layer that everything passes lets under 0.3 of the rank through that arrives from the loss.

    A narrow layer of more than one unit is a choice of the design, as in an autoencoder; one unit, or a wide layer
    that passes as little as a narrow one, is not. Nor is one unit that takes in no more than one, as a normalisation
    of a single channel does; nor what the loss has halved with.
    """
    if case.series.has_halved:
        return []
    necks = in_all([sample.remembered("necks", lambda sample: dict(_all_necks(sample))) for sample in case.recent])
    return [
        _issue(case, name, median(neck.rank for neck in found), median(neck.last for neck in found))
        for name, found in list(necks.items())[-1:]
    ]


def _all_necks(sample: Sample) -> Iterator[tuple[str, _Neck]]:
    graph = sample.graph
    for path in graph.paths.values():
        for neck in _necks(graph, path):
            if neck.width > 1 or _takes_in(sample, neck.layer) > 1:
                yield neck.layer, neck


def _takes_in(sample: Sample, layer: str) -> float:
    """Return how many inputs each unit of a layer sums up: one where it has no matrix."""
    matrices = [param.count for name, param in sample.params.items() if module_of(name) == layer and param.ndim > 1]
    return max(matrices, default=1)


def _necks(graph: FlowGraph, path: Sequence[int]) -> Iterator[_Neck]:
    """Return the layers before which the rank of the gradient falls at once, going back from the loss."""
    nodes = [graph.nodes[index] for index in path]
    last = next((node.effective_rank for node in reversed(nodes) if node.parametric), math.nan)
    layer = nodes[0]
    for before, after in pairwise(nodes):
        layer = before if before.parametric else layer
        wide = after.parametric and min(before.width, after.width) >= _WIDE
        if not (before.width == 1 or wide) or not _is_narrow(before, after, last):
            continue
        neck = layer if before.width == 1 else after
        if graph.separates(neck.name, path):
            yield _Neck(neck.name, neck.width, before.effective_rank, last)


def _is_narrow(before: Node, after: Node, last: float) -> bool:
    if before.least_rank >= _SHARE * last:
        return False
    return before.effective_rank < _SHARE * min(last, after.effective_rank)


def _issue(case: Case, layer: str, rank: float, last: float) -> Issue:
    return Issue(
        issue_type=IssueType.BOTTLENECK,
        severity=IssueSeverity.MEDIUM,
        layer=layer,
        message=f"The gradient behind {layer} has an effective rank of {rank:.2g}, the last layer's one of {last:.2g}.",
        statistic="rank_over_last_layer",
        value=rank / last,
        threshold=_SHARE,
        window=len(case.recent),
        step=case.step,
        confidence=0.85,
        recommendation=f"Give {layer} a rank of at least {max(2, round(last))}, or lead a skip connection around it.",
    )
