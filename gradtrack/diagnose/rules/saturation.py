"""Squashing functions at the ends of their range."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from gradtrack.diagnose.graph import FlowGraph
from gradtrack.diagnose.sample import Case, about_units, in_all, median
from gradtrack.reports import Issue, IssueSeverity, IssueType

_SHARE: Final = 0.5


@about_units
def judge(case: Case) -> list[Issue]:
    """Open where over half of the outputs of tanh or sigmoid are at the ends of their range, sample after sample.

    The last function before the loss may saturate: that is certainty, and what training is for.
    """
    shares = in_all([dict(_shares(graph)) for graph in case.graphs])
    return [_issue(case, name, median(values)) for name, values in shares.items() if min(values) > _SHARE]


def _shares(graph: FlowGraph) -> Iterator[tuple[str, float]]:
    found: dict[str, list[float]] = {}
    for index, node in enumerate(graph.nodes):
        following = set(graph.after[index])
        inner = any(graph.nodes[child].parametric or graph.children[child] for child in graph.children[index])
        if (node.kind == "RNN" and not math.isnan(node.beyond_tanh)) or (following == {"TanhBackward0"} and inner):
            found.setdefault(node.name, []).append(node.beyond_tanh)
        elif following == {"SigmoidBackward0"} and inner:
            found.setdefault(node.name, []).append(node.beyond_sigmoid)
    for name, values in found.items():
        yield name, median(values)


def _issue(case: Case, layer: str, share: float) -> Issue:
    return Issue(
        issue_type=IssueType.SATURATION,
        severity=IssueSeverity.HIGH,
        layer=layer,
        message=f"{share:.0%} of the outputs behind {layer} are at the ends of their range, where the slope is near 0.",
        statistic="saturated_share",
        value=share,
        threshold=_SHARE,
        window=len(case.recent),
        step=case.step,
        confidence=0.9,
        recommendation=f"Scale the weights of {layer} down, normalise its input, or put a LayerNorm behind it.",
    )
