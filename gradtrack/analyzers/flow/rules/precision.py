"""Rules about precision: where a NaN or an infinity comes from, and updates that rounding swallows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import nn

from gradtrack.analyzers.flow.call import Node
from gradtrack.analyzers.flow.graph import FlowGraph
from gradtrack.analyzers.flow.samples import Case, Sample, median
from gradtrack.health.open_issues import NONFINITE_GRADIENT, NONFINITE_INPUT, NONFINITE_OUTPUT, NONFINITE_WEIGHT
from gradtrack.health.rules.values import SCALER_PATIENCE
from gradtrack.reports import Issue, IssueSeverity, IssueType
from gradtrack.support.names import module_of


def judge_origin(case: Case) -> list[Issue]:
    """Open where the last sampled passes made values that are not finite; a sample that is sound closes it.

    Of backward passes two samples in a row must say so, and with a loss scaler they must be further apart than the
    overflows by which it finds its scale.
    """
    broken: list[_Origin] = []
    for sample in case.samples:
        if sample.nodes:
            found = sample.remembered("origin", _origin)
            broken = [] if found is None else [*broken, found]
    return [one.issue(case) for one in _established(broken)]


def judge_origin_ever(case: Case) -> list[Issue]:
    """Return the first place where sampled passes made values that are not finite, also where later ones are sound."""
    prefixes = (Case(case.series, case.samples[:end]) for end in range(1, len(case.samples) + 1))
    return next((found for prefix in prefixes if (found := judge_origin(prefix))), [])


def _established(broken: Sequence[_Origin]) -> Sequence[_Origin]:
    """Return which of the samples in a row that are not finite tells where that begins.

    Weights that are not finite are what an earlier step has left, so a backward pass before them is the origin.
    """
    made = next((one for one in broken if one.statistic in (NONFINITE_OUTPUT, NONFINITE_INPUT)), None)
    if made is not None:
        return [made]
    if len(broken) > 1 and not (broken[0].scaled and broken[-1].step - broken[0].step < SCALER_PATIENCE):
        return [broken[0] if broken[1].statistic == NONFINITE_WEIGHT else broken[1]]
    return [one for one in broken if one.statistic == NONFINITE_WEIGHT]


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a sampled step first became NaN or infinite, on its way forward or back."""

    step: int
    layer: str
    statistic: str
    message: str
    advice: str
    scaled: bool

    def issue(self, case: Case) -> Issue:
        return case.issue(
            IssueType.NUMERICAL,
            self.layer,
            (self.statistic, 1.0, 0.0),
            self.message,
            self.advice,
            severity=IssueSeverity.CRITICAL,
            window=len(case.samples),
            step=self.step,
        )


def _origin(sample: Sample) -> _Origin | None:
    node = next((one for one in sample.nodes if not one.finite), None)
    if node is not None:
        return _origin_forward(sample, node)
    layer = _broken_at(sample.graph)
    if layer is None:
        return None
    data = "" if layer else "NaN in the targets of the batch, or "
    return _Origin(
        sample.step,
        layer,
        statistic=NONFINITE_GRADIENT,
        message=(
            f"The gradient becomes NaN or infinite on its way back through {layer or 'the loss'}, "
            "though every output is finite."
        ),
        advice=(
            f"Look for {data}a root, a norm or a division whose derivative at 0 is infinite: "
            "add a small number inside it."
        ),
        scaled=sample.scaled,
    )


def _origin_forward(sample: Sample, node: Node) -> _Origin:
    layer = node.made_in or node.name
    what = f"{layer} is the first module whose output is NaN or infinite"
    weights = [name for name, param in sample.params.items() if module_of(name) == node.name and _is_bad(param.weight)]
    statistic, how = NONFINITE_OUTPUT, f"Look at the weights and inputs of {layer} at step {sample.step}"
    if " of the model has " in node.bad_input:
        statistic, what = NONFINITE_INPUT, f"{what}: {node.bad_input}"
        how = f"Look at the data of the batch of step {sample.step}."
    elif node.bad_input:
        what, how = f"{what}: {node.bad_input}", f"{how}: overflow, division by zero, log(0)."
    elif weights and node.finite_input:
        statistic, what = NONFINITE_WEIGHT, f"{what}, since {weights[0]} is already"
        how = f"Look at the first step with such gradients, at or before step {sample.step}: it made the weights so."
    else:
        made = ", from finite inputs" if node.finite_input or node.made_in else ""
        what, how = f"{what}{made}", f"{how}: overflow, division by zero, log(0)."
    return _Origin(sample.step, layer, statistic, f"{what}.", how, sample.scaled)


def _is_bad(norm: float) -> bool:
    return not math.isfinite(norm)


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


_LOST: Final = 0.9
_LOST_AND_STUCK: Final = 0.7
_TINY: Final = 0.5
_SAMPLES: Final = 3


def judge_rounding(case: Case) -> list[Issue]:
    """Open where over 90 % of 16-bit weights stay as they are, or over half of float16 gradients underflow.

    70 % are enough where the loss has not come down at all.
    """
    moved = case.moved[-_SAMPLES:]
    if len(moved) < _SAMPLES:
        return []
    lost = [_shares(sample, "unchanged") for sample in moved]
    tiny = [math.nan if sample.scaled else _shares(sample, "subnormal") for sample in moved]
    if all(share > _TINY for share in tiny):
        what = f"{median(tiny):.0%} of the elements of the float16 gradients are too small to keep their precision."
        advice = "Scale the loss up with torch.amp.GradScaler, or train in bfloat16."
        return [_rounding_issue(case, "subnormal_gradients", median(tiny), _TINY, what, advice)]
    limit = _LOST_AND_STUCK if case.is_stuck else _LOST
    if all(share > limit for share in lost):
        what = f"At lr {moved[-1].lr:.3g}, {median(lost):.0%} of the 16-bit weights are rounded back to what they were."
        advice = "Keep the weights in float32 and use autocast, or an optimizer with float32 master weights."
        return [_rounding_issue(case, "unchanged_elements", median(lost), limit, what, advice)]
    return []


def _shares(sample: Sample, which: str) -> float:
    """Return the median over the weights of 16 bits, or with such gradients, that the optimizer has; NaN of none."""
    return median(
        getattr(change, which)
        for name, change in (sample.changes or {}).items()
        if name in sample.params and sample.params[name].owned and (which == "subnormal" or sample.params[name].coarse)
    )


def _rounding_issue(case: Case, statistic: str, value: float, threshold: float, message: str, advice: str) -> Issue:
    return case.issue(IssueType.NUMERICAL, "", (statistic, value, threshold), message, advice, window=_SAMPLES)
