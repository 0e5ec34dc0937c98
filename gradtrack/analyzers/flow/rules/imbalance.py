"""Rule about parameters, or heads of the loss, whose gradients outweigh all others."""

from __future__ import annotations

import math
from typing import Final

from gradtrack.analyzers.flow.samples import Case, Sample, median
from gradtrack.reports import Issue, IssueSeverity, IssueType
from gradtrack.support.names import module_of

_RATIO: Final = 1e3
_HEADS: Final = 5e3
_YOUNG: Final = 1.5
_SIBLINGS: Final = 3


def judge_imbalance(case: Case) -> list[Issue]:
    """Open where ‖g‖/‖w‖ of a weight is over 1000 times any other's, or a head's gradient over 5000 times another's.

    Silent on weights that are still growing from zero, and beside blocks whose gain began there. A small auxiliary
    loss, down to a thousandth, is a choice.
    """
    issue = (_weights(case) or _heads(case)) if case.recent else None
    return [] if issue is None else [issue]


def _weights(case: Case) -> Issue | None:
    ratios = [_outlier(sample, case.began_at_zero) for sample in case.recent]
    name = ratios[-1][0]
    if any(other != name or not ratio > _RATIO for other, ratio in ratios):
        return None
    first, last = case.samples[0].params, case.samples[-1].params
    if name not in first or last[name].weight > _YOUNG * first[name].weight:
        return None
    ratio = median(ratio for _, ratio in ratios)
    what = f"The gradient of {name}, relative to its weight, is {ratio:.2g} times that of any other weight."
    return _issue(case, name, ratio, _RATIO, what)


def _outlier(sample: Sample, young: set[str]) -> tuple[str, float]:
    """Return the weight with the largest relative gradient, and by how much it leads those outside of young blocks."""
    found = sorted(
        (param.relative, name)
        for name, param in sample.params.items()
        if param.ndim > 1 and param.has_grad and param.weight > 0 and param.norm > 0
        if not any(name.startswith(f"{block}.") and module_of(name) != block for block in young)
    )
    if len(found) <= _SIBLINGS:
        return "", math.nan
    return found[-1][1], found[-1][0] / found[-2][0]


def _heads(case: Case) -> Issue | None:
    found = [sample.remembered("loudest", _loudest) for sample in case.recent]
    name = found[-1][0]
    if not name or any(other != name or not ratio > _HEADS for other, ratio in found):
        return None
    ratio = median(ratio for _, ratio in found)
    what = f"The loss sends {ratio:.2g} times as much gradient to {name} as to the quietest other head."
    return _issue(case, name, ratio, _HEADS, what)


def _loudest(sample: Sample) -> tuple[str, float]:
    """Return, of the last layers of the model, the one with the largest gradient, over the smallest."""
    graph = sample.graph
    ends: dict[str, float] = {}
    for index, node in enumerate(graph.nodes):
        if node.parametric and graph.delta[index] > 0 and not graph.children[index]:
            ends[node.name] = max(ends.get(node.name, 0.0), graph.delta[index])
    if len(ends) < 2:
        return "", math.nan
    name = max(ends, key=lambda key: ends[key])
    return name, ends[name] / min(ends.values())


def _issue(case: Case, layer: str, ratio: float, threshold: float, message: str) -> Issue:
    return case.issue(
        IssueType.GRAD_IMBALANCE,
        layer,
        ("gradient_over_others", ratio, threshold),
        message,
        f"Weigh the loss that feeds {layer} down about {ratio:.0e} times, or give it its own lr.",
        severity=IssueSeverity.MEDIUM,
        confidence=0.7,
    )
