"""Rules about precision: where a NaN or an infinity comes from, and updates that rounding swallows."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

from torch import nn

from gradtrack.analyzers.flow.graph import FlowGraph
from gradtrack.analyzers.flow.samples import Case, Sample, median
from gradtrack.reports import Issue, IssueSeverity, IssueType


def judge_origin(case: Case) -> list[Issue]:
    """Open where a sampled forward pass made values that are not finite out of values that were, or a backward pass.

    Of the backward pass two samples in a row must say so. A loss scale that is being found overflows now and then, and
    did so where a later sample is sound.
    """
    for sample in case.samples:
        node = sample.remembered(
            "nonfinite", lambda sample: next((one for one in sample.nodes if not one.finite), None)
        )
        if node is not None:
            layer = node.made_in or node.name
            made = ", from finite inputs" if node.finite_input or node.made_in else ""
            made = f": {node.bad_input}" if node.bad_input else made
            what = f"{layer} is the first module whose output is NaN or infinite{made}."
            where = f"the weights and inputs of {layer} at step {sample.step}"
            how = f"Look at {where}: overflow, division by zero, log(0)."
            if " of the model has " in node.bad_input:
                how = f"Look at the data of the batch of step {sample.step}."
            return [_origin_issue(case, sample.step, layer, what, how)]
    places = [sample.remembered("broken", lambda sample: _broken_at(sample.graph)) for sample in case.samples]
    sound = max((index for index, place in enumerate(places) if place is None), default=-1)
    for index, (before, after) in enumerate(pairwise(places), start=1):
        was_searching = case.samples[index].scaled and index < sound
        if before is not None and after is not None and not was_searching:
            way = f"on its way back through {after or 'the loss'}, though every output is finite"
            data = "" if after else "NaN in the targets of the batch, or "
            how = (
                f"Look for {data}a root, a norm or a division whose derivative at 0 is infinite: "
                "add a small number inside it."
            )
            what = f"The gradient becomes NaN or infinite {way}."
            return [_origin_issue(case, case.samples[index].step, after, what, how)]
    return []


def _broken_at(graph: FlowGraph) -> str | None:
    """Return where the gradient stops being finite on its way back: "" right at the loss, None nowhere."""
    broken = [
        index for index, node in enumerate(graph.nodes) if node.delta is not None and not math.isfinite(node.delta)
    ]
    if not broken:
        return None
    last = broken[-1]
    sound = [graph.nodes[child] for child in graph.children[last]]
    if not sound:
        return ""
    own = [node.name for node in sound if not hasattr(nn, node.kind)]  # whose code is not torch's
    return own[0] if own else graph.nodes[last].name


def _origin_issue(case: Case, step: int, layer: str, message: str, recommendation: str) -> Issue:
    return case.issue(
        IssueType.NUMERICAL,
        layer,
        ("nonfinite_output", 1.0, 0.0),
        message,
        recommendation,
        severity=IssueSeverity.CRITICAL,
        window=len(case.samples),
        step=step,
    )


_LOST: Final = 0.9
_TINY: Final = 0.5
_SAMPLES: Final = 3


def judge_rounding(case: Case) -> list[Issue]:
    """Open where over 90 % of 16-bit weights stay as they are, or over half of float16 gradients underflow."""
    moved = case.moved[-_SAMPLES:]
    if len(moved) < _SAMPLES:
        return []
    lost = [_shares(sample, "unchanged") for sample in moved]
    tiny = [math.nan if sample.scaled else _shares(sample, "subnormal") for sample in moved]
    if all(share > _TINY for share in tiny):
        what = f"{median(tiny):.0%} of the elements of the float16 gradients are too small to keep their precision."
        advice = "Scale the loss up with torch.amp.GradScaler, or train in bfloat16."
        return [_rounding_issue(case, "subnormal_gradients", median(tiny), _TINY, what, advice)]
    if all(share > _LOST for share in lost):
        what = f"At lr {moved[-1].lr:.3g}, {median(lost):.0%} of the 16-bit weights are rounded back to what they were."
        advice = "Keep the weights in float32 and use autocast, or an optimizer with float32 master weights."
        return [_rounding_issue(case, "unchanged_elements", median(lost), _LOST, what, advice)]
    return []


def _shares(sample: Sample, which: str) -> float:
    """Return the median over the weights of 16 bits, or with such gradients, that the optimizer has; NaN of none."""
    return median(
        getattr(change, which)
        for name, change in (sample.changes or {}).items()
        if name in sample.params and sample.params[name].owned and (which == "subnormal" or sample.params[name].coarse)
    )


def _rounding_issue(case: Case, statistic: str, value: float, threshold: float, message: str, advice: str) -> Issue:
    return case.issue(
        IssueType.NUMERICAL, "", (statistic, value, threshold), message, advice, window=_SAMPLES, confidence=0.9
    )
