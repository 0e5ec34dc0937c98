"""The typed report on attention, and how it is put together from what forward passes showed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import Field

from gradtrack.analyzers.transformer.recorder import ForwardPass
from gradtrack.analyzers.transformer.statistics import HeadStatistics, TokenStatistics
from gradtrack.records import Metric
from gradtrack.reports import Issue, Report
from gradtrack.reports.base import measured
from gradtrack.support.statistics import mean

Risk = Literal["LOW", "MEDIUM", "HIGH"]
_SHOWN = 32
_Item = TypeVar("_Item")


class HeadReport(Report):
    """One head: its entropy and the least that its logits allow, both over ln of the visible keys, and its extremes."""

    entropy: float
    entropy_floor: float
    max_logit: float
    sparsity: float


class LayerReport(Report):
    """The attention of one module, averaged over heads; `entropy_p5` is the 5th percentile over rows and heads."""

    name: str
    entropy_mean: Annotated[float, Metric("attention/entropy_mean/<layer>", "Entropy of one layer.", unit="share")]
    entropy_min_head: float
    entropy_p5: float
    entropy_floor: float
    max_logit: Annotated[float, Metric("attention/max_logit/<layer>", "The largest logit of one layer.")]
    sparsity: float
    head_diversity: Annotated[
        float | None,
        Metric(
            "attention/head_diversity/<layer>",
            "How different they are in one layer.",
            unit="share",
            when="several heads",
        ),
    ]
    softmax_jacobian: float | None = None
    heads: list[HeadReport]
    num_rows: int
    num_keys: int


class BlockReport(Report):
    """The residual stream after one block: how different its tokens are, their mean cosine and their effective rank."""

    name: str
    residual: Annotated[
        float,
        Metric("attention/rank_residual/<block>", "Difference left between tokens after one block.", unit="share"),
    ]
    mean_cosine: float
    effective_rank: float


class AttentionReport(Report):
    """The attention of a model; entropies are over ln of the number of visible keys, shares from 0 to 1.

    Fields are None where nothing was seen that could tell them. `rank_slope` is the change of ln(residual) per block.
    """

    attention_entropy_mean: float | None = measured(
        "attention/entropy_mean", "Entropy over that of uniform attention, mean over layers.", unit="share"
    )
    attention_entropy_min_head: float | None = measured(
        "attention/entropy_min_head", "The same of the lowest head of all layers.", unit="share"
    )
    attention_entropy_p5: float | None = measured(
        "attention/entropy_p5", "5th percentile over rows and heads, of the lowest layer.", unit="share"
    )
    attention_entropy_floor: float | None = measured(
        "attention/entropy_floor", "The least entropy that logits of this size allow.", unit="share"
    )
    attention_sparsity: float | None = measured(
        "attention/sparsity", "Visible keys that get less than a tenth of the uniform weight.", unit="share"
    )
    attention_max_logit: float | None = measured(
        "attention/max_logit", "The largest attention logit; its growth comes before a collapse of entropy."
    )
    head_diversity: float | None = measured(
        "attention/head_diversity", "How different heads are; 0 when alike.", unit="share", when="several heads"
    )
    rank_residual: float | None = measured(
        "attention/rank_residual", "Difference left between tokens after the last block.", unit="share"
    )
    rank_slope: float | None = None
    rank_collapse_risk: Risk | None = measured(
        "attention/rank_collapse_risk", "Risk that depth makes tokens equal: 2 is HIGH.", unit="0 to 2"
    )
    gradient_coherence: float | None = measured(
        "attention/gradient_coherence", "Mean cosine of consecutive gradients.", when="offline, enable_vector_analysis"
    )
    layers: list[LayerReport] = Field(default_factory=list)
    blocks: list[BlockReport] = Field(default_factory=list)
    issues: list[Issue] = Field(default_factory=list)
    num_passes: int = 1
    num_unread_calls: int = 0

    def metric_parts(self) -> Iterator[tuple[str, Report]]:
        """Return up to 32 layers and blocks, by name."""
        yield from ((layer.name, layer) for layer in _spread_out(self.layers))
        yield from ((block.name, block) for block in _spread_out(self.blocks))


def report_attention(passes: Sequence[ForwardPass], *, softmax_jacobian: bool = False) -> AttentionReport:
    """Average what forward passes showed, layer by layer."""
    layers = [
        _layer(name, [found for one in passes for found in one.heads.get(name, ())], softmax_jacobian)
        for name in dict.fromkeys(name for one in passes for name in one.heads)
    ]
    blocks = [
        _block(name, [found for one in passes for found in one.tokens.get(name, ())])
        for name in dict.fromkeys(name for one in passes for name in one.tokens)
    ]
    slope = _slope([block.residual for block in blocks])
    return AttentionReport(
        attention_entropy_mean=mean(layer.entropy_mean for layer in layers),
        attention_entropy_min_head=_end(min, [layer.entropy_min_head for layer in layers]) if layers else None,
        attention_entropy_p5=_end(min, [layer.entropy_p5 for layer in layers]) if layers else None,
        attention_entropy_floor=mean(layer.entropy_floor for layer in layers),
        attention_sparsity=mean(layer.sparsity for layer in layers),
        attention_max_logit=_end(max, [layer.max_logit for layer in layers]) if layers else None,
        head_diversity=mean(layer.head_diversity for layer in layers if layer.head_diversity is not None),
        rank_residual=blocks[-1].residual if blocks else None,
        rank_slope=slope,
        rank_collapse_risk=_risk([block.residual for block in blocks]),
        layers=layers,
        blocks=blocks,
        num_passes=len(passes),
        num_unread_calls=sum(one.num_unread for one in passes),
    )


def _layer(name: str, found: Sequence[HeadStatistics], softmax_jacobian: bool) -> LayerReport:
    columns = ("entropy", "floor", "max_logit", "sparsity", "softness")
    table = torch.stack([torch.stack([getattr(one, column).double() for column in columns]) for one in found])
    unseen = table[:, 2] == -math.inf  # heads of a call of whose rows none sees two keys, so that nothing is known
    averages = table.masked_fill(unseen.unsqueeze(1), 0.0).sum(0) / (~unseen).sum(0)
    averages[2] = table[:, 2].amax(0)
    judged = averages if bool(unseen.all()) else averages[:, ~unseen.all(0)]
    entropy, floor, max_logit, sparsity, _ = averages.tolist()
    of_layer = dict(zip(columns, judged.tolist(), strict=True))
    diversity = mean(float(one.diversity) for one in found)
    heads = [
        HeadReport(entropy=values[0], entropy_floor=values[1], max_logit=values[2], sparsity=values[3])
        for values in zip(entropy, floor, max_logit, sparsity, strict=True)
    ]
    return LayerReport(
        name=name,
        entropy_mean=_mean(of_layer["entropy"]),
        entropy_min_head=_end(min, of_layer["entropy"]),
        entropy_p5=sum(float(one.low_entropy) for one in found) / len(found),
        entropy_floor=_mean(of_layer["floor"]),
        max_logit=_end(max, of_layer["max_logit"]),
        sparsity=_mean(of_layer["sparsity"]),
        head_diversity=None if diversity is None or math.isnan(diversity) else diversity,
        softmax_jacobian=_mean(of_layer["softness"]) if softmax_jacobian else None,
        heads=heads,
        num_rows=int(sum(one.num_rows for one in found)),
        num_keys=max(one.num_keys for one in found),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _block(name: str, found: Sequence[TokenStatistics]) -> BlockReport:
    residual, cosine, rank = (sum(column) / len(found) for column in zip(*found, strict=True))
    return BlockReport(name=name, residual=residual, mean_cosine=cosine, effective_rank=rank)


def _risk(residuals: Sequence[float]) -> Risk | None:
    """Judge the level at the end, and whether depth takes the difference of tokens away on the whole of its way."""
    if not residuals or not all(map(math.isfinite, residuals)):
        return None
    first, middle, last = residuals[0], residuals[len(residuals) // 2], residuals[-1]
    if last < 0.01 or (last < 0.1 * min(first, 1.0) and middle < 0.5 * first):
        return "HIGH"
    return "MEDIUM" if last < 0.1 or last < 0.3 * first else "LOW"


def _slope(residuals: Sequence[float]) -> float | None:
    """Return the least-squares slope of ln(residual) per block."""
    logs = {depth: math.log(value) for depth, value in enumerate(residuals) if 0 < value < math.inf}
    return statistics.linear_regression(list(logs), list(logs.values())).slope if len(logs) > 1 else None


def _end(pick: Callable[..., float], values: Sequence[float]) -> float:
    """Pick the least or the largest of the values that are numbers; NaN where none is."""
    return pick((value for value in values if not math.isnan(value)), default=math.nan)


def _spread_out(items: Sequence[_Item]) -> Sequence[_Item]:
    """Return at most 32 items, evenly spread, always with the first and the last."""
    if len(items) <= _SHOWN:
        return items
    return [items[index * (len(items) - 1) // (_SHOWN - 1)] for index in range(_SHOWN)]
