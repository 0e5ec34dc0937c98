"""The verdict on attention: collapse of its entropy, heads that do the same, and tokens that become equal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from gradtrack.analyzers.base import Suggested
from gradtrack.analyzers.transformer.report import AttentionReport, LayerReport
from gradtrack.reports import Issue, IssueSeverity, IssueType

EXPLAINED_BY: Final[Mapping[IssueType, tuple[IssueType, ...]]] = {
    IssueType.ATTN_ENTROPY_COLLAPSE: (IssueType.LR_TOO_HIGH,),
    IssueType.RANK_COLLAPSE: (IssueType.LR_TOO_HIGH,),
    IssueType.HEAD_REDUNDANCY: (IssueType.RANK_COLLAPSE, IssueType.ATTN_ENTROPY_COLLAPSE),
}
_COLLAPSED: Final = 0.1
_REDUNDANT: Final = 0.01
_UNIFORM: Final = 0.9


def judge(report: AttentionReport, least_entropy: float, least_diversity: float) -> list[Issue]:
    """Return the issues of a report; a threshold that the user did not choose gives way to the limit of collapse."""
    broken = [layer for layer in report.layers if not math.isfinite(layer.entropy_mean)]
    if broken:
        return [_nonfinite(broken[0])]
    found = [
        issue
        for layer in report.layers
        for issue in (*_entropy(layer, least_entropy), *_redundancy(layer, least_diversity))
    ]
    return found + _rank_collapse(report)


def _nonfinite(layer: LayerReport) -> Issue:
    return Issue(
        issue_type=IssueType.NUMERICAL,
        severity=IssueSeverity.CRITICAL,
        layer=layer.name,
        message="Attention logits are NaN or infinite from this layer on.",
        statistic="attention_entropy_mean",
        recommendation="Lower the learning rate, clip the gradient norm or normalise queries and keys.",
    )


def _entropy(layer: LayerReport, least: float) -> list[Issue]:
    chosen = not isinstance(least, Suggested)
    limit = float(least) if chosen else _COLLAPSED
    if not layer.entropy_mean < limit:
        return []
    return [
        Issue(
            issue_type=IssueType.ATTN_ENTROPY_COLLAPSE,
            severity=IssueSeverity.HIGH if layer.entropy_mean < _COLLAPSED else IssueSeverity.MEDIUM,
            layer=layer.name,
            message=(
                f"Attention looks at few positions: its entropy is {layer.entropy_mean:.3g} of ln(visible keys), "
                f"the largest logit {layer.max_logit:.3g}."
            ),
            statistic="attention_entropy_mean",
            value=layer.entropy_mean,
            threshold=limit,
            recommendation="Normalise queries and keys, lower the learning rate or lengthen the warm-up.",
        )
    ]


def _redundancy(layer: LayerReport, least: float) -> list[Issue]:
    """Judge heads only while they look somewhere in particular: uniform heads are equal by necessity."""
    chosen = not isinstance(least, Suggested)
    limit = float(least) if chosen else _REDUNDANT
    if layer.head_diversity is None or layer.entropy_mean > _UNIFORM or not layer.head_diversity < limit:
        return []
    return [
        Issue(
            issue_type=IssueType.HEAD_REDUNDANCY,
            severity=IssueSeverity.MEDIUM,
            layer=layer.name,
            message=f"The {len(layer.heads)} heads do nearly the same: diversity {layer.head_diversity:.3g}.",
            statistic="head_diversity",
            value=layer.head_diversity,
            threshold=limit,
            recommendation="Use fewer heads, or initialise their projections independently.",
        )
    ]


def _rank_collapse(report: AttentionReport) -> list[Issue]:
    if report.rank_collapse_risk != "HIGH":
        return []
    first, last = report.blocks[0], report.blocks[-1]
    limit = 0.01 if last.residual < 0.01 else 0.1 * min(first.residual, 1.0)
    return [
        Issue(
            issue_type=IssueType.RANK_COLLAPSE,
            severity=IssueSeverity.HIGH,
            layer=next(block.name for block in report.blocks if block.residual < limit),
            message=(
                f"Tokens become equal with depth: their difference is {first.residual:.3g} of their size after "
                f"{first.name or 'the first block'} and {last.residual:.3g} after {last.name or 'the last'}."
            ),
            statistic="rank_residual",
            value=last.residual,
            threshold=limit,
            recommendation="Check the skip connections and their scale; normalise before each block, not after it.",
        )
    ]
