"""A layer through which less passes back than the loss sends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from gradtrack.diagnose.graph import FlowGraph
from gradtrack.diagnose.sample import Case, median, windowed
from gradtrack.reports import Issue, IssueSeverity, IssueType

_SHARE: Final = 0.3
_WIDE: Final = 8


@dataclass(slots=True)
class _Neck:
    layer: str
    rank: float
    last: float


@windowed
def judge(case: Case) -> list[Issue]:
    """Open where one layer that everything passes lets under 0.3 of the rank through that arrives from the loss.

    A narrow layer of more than one unit is a choice of the design, as in an autoencoder; one unit, or a wide layer
    that passes as little as a narrow one, is not.
    """
    if not case.recent:
        return []
    necks = [
        {neck.layer: neck for path in graph.paths.values() for neck in _necks(graph, path)} for graph in case.graphs
    ]
    names = [name for name in necks[-1] if all(name in found for found in necks)]
    return [
        _issue(case, name, median(found[name].rank for found in necks), median(found[name].last for found in necks))
        for name in names[-1:]
    ]


def _necks(graph: FlowGraph, path: Sequence[int]) -> Iterator[_Neck]:
    """Return the layers before which the rank of the gradient falls at once, going back from the loss."""
    nodes = [graph.nodes[index] for index in path]
    last = next((node.rank for node in reversed(nodes) if node.parametric), math.nan)
    layer = nodes[0]
    for before, after in pairwise(nodes):
        layer = before if before.parametric else layer
        wide = after.parametric and min(before.width, after.width) >= _WIDE
        if not (before.width == 1 or wide) or math.isnan(before.rank):
            continue
        neck = layer if before.width == 1 else after
        if before.rank < _SHARE * min(last, after.rank) and graph.separates(neck.name, path):
            yield _Neck(neck.name, before.rank, last)


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
