"""The verdict on attention: collapse of its entropy, heads that do the same, and tokens that become equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gradtrack.analyzers.base import DefaultThreshold
from gradtrack.analyzers.transformer.report import AttentionReport, LayerReport
from gradtrack.reports import Issue, IssueSeverity, IssueType

EXPLAINED_BY: Final[Mapping[IssueType, tuple[IssueType, ...]]] = {
    IssueType.ATTN_ENTROPY_COLLAPSE: (IssueType.ATTN_SCALE, IssueType.ATTN_MASK, IssueType.LR_TOO_HIGH),
    IssueType.RANK_COLLAPSE: (IssueType.NO_SKIP, IssueType.LR_TOO_HIGH),
    IssueType.HEAD_REDUNDANCY: (IssueType.RANK_COLLAPSE, IssueType.ATTN_ENTROPY_COLLAPSE),
}
_COLLAPSED: Final = 0.1
_REDUNDANT: Final = 0.01
_UNIFORM: Final = 0.9


def judge(report: AttentionReport, wired: Sequence[Issue], least_entropy: float, least_diversity: float) -> list[Issue]:
    """Return the issues of a report; a threshold that the user did not choose gives way to the limit of collapse.

    `wired` are those of the wiring: what is NaN from one layer on is so because of the rows there that see no key.
    """
    broken = [layer for layer in report.layers if not math.isfinite(layer.entropy_mean)]
    if broken:
        known = any(issue.issue_type is IssueType.NUMERICAL for issue in wired)
        return [*wired, *([] if known else [_nonfinite(broken[0])])]
    found: list[Issue] = list(wired)
    for layer in report.layers:
        found += [*_entropy(layer, least_entropy), *_redundancy(layer, least_diversity)]
    return [*found, *_rank_collapse(report)]


def _nonfinite(layer: LayerReport) -> Issue:
    return Issue(
        issue_type=IssueType.NUMERICAL,
        severity=IssueSeverity.CRITICAL,
        layer=layer.name,
        message="Attention logits are NaN or infinite from this layer on.",
        statistic="attention_entropy_mean",
        recommendation="Lower the learning rate, clip the gradient norm or normalise queries and keys.",
    )


def _entropy(layer: LayerReport, least: float) -> Iterator[Issue]:
    limit = _COLLAPSED if isinstance(least, DefaultThreshold) else float(least)
    if layer.entropy_mean < limit:
        yield Issue.found(
            IssueType.ATTN_ENTROPY_COLLAPSE,
            layer.name,
            ("attention_entropy_mean", layer.entropy_mean, limit),
            (
                f"Attention looks at few positions: its entropy is {layer.entropy_mean:.3g} of ln(visible keys), "
                f"the largest logit {layer.max_logit:.3g}."
            ),
            "Normalise queries and keys, lower the learning rate or lengthen the warm-up.",
            severity=IssueSeverity.HIGH if layer.entropy_mean < _COLLAPSED else IssueSeverity.MEDIUM,
        )


def _redundancy(layer: LayerReport, least: float) -> Iterator[Issue]:
    """Judge heads only while they look somewhere in particular: uniform heads are equal by necessity."""
    limit = _REDUNDANT if isinstance(least, DefaultThreshold) else float(least)
    if layer.head_diversity is not None and layer.entropy_mean <= _UNIFORM and layer.head_diversity < limit:
        yield Issue.found(
            IssueType.HEAD_REDUNDANCY,
            layer.name,
            ("head_diversity", layer.head_diversity, limit),
            f"The {len(layer.heads)} heads do nearly the same: diversity {layer.head_diversity:.3g}.",
            "Use fewer heads, or initialise their projections independently.",
            severity=IssueSeverity.MEDIUM,
        )


def _rank_collapse(report: AttentionReport) -> Iterator[Issue]:
    if report.rank_collapse_risk == "HIGH":
        first, last = report.blocks[0], report.blocks[-1]
        limit = 0.01 if last.residual < 0.01 else 0.1 * min(first.residual, 1.0)
        yield Issue.found(
            IssueType.RANK_COLLAPSE,
            next(block.name for block in report.blocks if block.residual < limit),
            ("rank_residual", last.residual, limit),
            (
                f"Tokens become equal with depth: their difference is {first.residual:.3g} of their size after "
                f"{first.name or 'the first block'} and {last.residual:.3g} after {last.name or 'the last'}."
            ),
            "Check the skip connections and their scale; normalise before each block, not after it.",
        )
