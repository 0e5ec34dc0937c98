"""Issues, their types and severities, and the health of a step that follows from them."""

from __future__ import annotations

import difflib
import re
from enum import Enum
from functools import total_ordering
from typing import Any, ClassVar, Final

from pydantic import ConfigDict, Field

from gradtrack import registry
from gradtrack.reports import html
from gradtrack.reports.base import Report
from gradtrack.support.names import plural


@total_ordering
class IssueSeverity(Enum):
    """How much an issue matters; the members compare by it."""

    INFO = "INFO"
    LOW = "LOW"
    MEDIUM = "MEDIUM"
    HIGH = "HIGH"
    CRITICAL = "CRITICAL"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, IssueSeverity):
            return NotImplemented
        order = list(IssueSeverity)
        return order.index(self) < order.index(other)


class IssueType(Enum):
    """The kinds of faults of a training run."""

    VANISHING = "VANISHING"
    EXPLODING = "EXPLODING"
    DEAD = "DEAD"
    UNSTABLE = "UNSTABLE"
    NUMERICAL = "NUMERICAL"
    LOSS_JUMP = "LOSS_JUMP"
    SATURATION = "SATURATION"
    BOTTLENECK = "BOTTLENECK"
    DISCONNECTED = "DISCONNECTED"
    UNCHANGED = "UNCHANGED"
    STALE_GRAD = "STALE_GRAD"
    LR_TOO_HIGH = "LR_TOO_HIGH"
    LR_TOO_LOW = "LR_TOO_LOW"
    CLIP_SATURATED = "CLIP_SATURATED"
    GRAD_IMBALANCE = "GRAD_IMBALANCE"
    SHORT_MEMORY = "SHORT_MEMORY"
    SUPERCRITICAL = "SUPERCRITICAL"
    ENTROPY_COLLAPSE = "ENTROPY_COLLAPSE"
    OVER_EXPLORATION = "OVER_EXPLORATION"
    INSUFFICIENT_EXPLORATION = "INSUFFICIENT_EXPLORATION"
    LOW_ACTION_STD = "LOW_ACTION_STD"
    ATTN_ENTROPY_COLLAPSE = "ATTN_ENTROPY_COLLAPSE"
    HEAD_REDUNDANCY = "HEAD_REDUNDANCY"
    RANK_COLLAPSE = "RANK_COLLAPSE"
    LOW_EFFECTIVE_RANK = "LOW_EFFECTIVE_RANK"
    ROTATION = "ROTATION"
    ACTIVATED_TWICE = "ACTIVATED_TWICE"
    RECTIFIED_LOGITS = "RECTIFIED_LOGITS"
    MISSING_LOG_SOFTMAX = "MISSING_LOG_SOFTMAX"
    SOFTMAX_DIMENSION = "SOFTMAX_DIMENSION"
    BROADCAST_LOSS = "BROADCAST_LOSS"
    NEGATED_LOSS = "NEGATED_LOSS"
    ATTN_SCALE = "ATTN_SCALE"
    ATTN_MASK = "ATTN_MASK"
    NO_SKIP = "NO_SKIP"
    NO_PROJECTION = "NO_PROJECTION"
    EQUAL_UNITS = "EQUAL_UNITS"
    LR_NEGATIVE = "LR_NEGATIVE"
    EVAL_MODE = "EVAL_MODE"
    TARGET_RANGE = "TARGET_RANGE"
    SQUARED_CLASSES = "SQUARED_CLASSES"
    CHANCE_LEVEL = "CHANCE_LEVEL"
    REPLICA_DRIFT = "REPLICA_DRIFT"


T = IssueType
_CONFIDENCE: Final = {
    T.ACTIVATED_TWICE: 0.93,
    T.ATTN_ENTROPY_COLLAPSE: 0.94,
    T.ATTN_MASK: 0.91,
    T.ATTN_SCALE: 0.88,
    T.BOTTLENECK: 0.72,
    T.BROADCAST_LOSS: 0.93,
    T.CLIP_SATURATED: 0.93,
    T.DEAD: 0.61,
    T.DISCONNECTED: 0.93,
    T.EQUAL_UNITS: 0.93,
    T.EVAL_MODE: 0.92,
    T.EXPLODING: 0.75,
    T.HEAD_REDUNDANCY: 0.71,
    T.LOSS_JUMP: 0.89,
    T.LR_NEGATIVE: 0.89,
    T.LR_TOO_HIGH: 0.85,
    T.LR_TOO_LOW: 0.71,
    T.MISSING_LOG_SOFTMAX: 0.92,
    T.NO_SKIP: 0.89,
    T.NUMERICAL: 0.87,
    T.RANK_COLLAPSE: 0.75,
    T.RECTIFIED_LOGITS: 0.92,
    T.ROTATION: 0.81,
    T.SATURATION: 0.8,
    T.SHORT_MEMORY: 0.89,
    T.SOFTMAX_DIMENSION: 0.88,
    T.STALE_GRAD: 0.85,
    T.SUPERCRITICAL: 0.88,
    T.UNCHANGED: 0.9,
    T.UNSTABLE: 0.89,
    T.VANISHING: 0.8,
}
"""The share of the issues of a type that named what was wrong, in 380 runs whose authors did not know the rules.

Each is drawn to that of all types, as if five more issues of the type had been found; `docs/diagnosis-measured.md` has
the numbers.
"""
_USUAL: Final = 0.85
_LOW: Final = 0.7


def usual_confidence(kind: IssueType) -> float:
    """Return how likely an issue of a type is to name what is wrong, as measured on runs that no rule was made for."""
    return _CONFIDENCE.get(kind, _USUAL)


def doubt_about(confidence: float, explained_by: object) -> str:
    """Say that an issue which nothing explains is perhaps not the cause; nothing where it is likely to be."""
    return "perhaps not the cause" if confidence < _LOW and not explained_by else ""


class Issue(Report):
    """One finding: what, where, how it was measured and what to do about it.

    `layer` is empty for the whole run; `source` names the pair of model and optimizer where there are several.
    """

    issue_type: IssueType
    severity: IssueSeverity
    layer: str = ""
    message: str
    statistic: str = ""
    value: float | None = None
    threshold: float | None = None
    window: int = 1
    step: int = 0
    explained_by: str | None = None
    confidence: float = 1.0
    recommendation: str = ""
    source: str = ""

    @classmethod
    def found(
        cls,
        kind: IssueType,
        layer: str,
        measured: tuple[str, float | None, float | None],
        message: str,
        recommendation: str,
        *,
        severity: IssueSeverity = IssueSeverity.HIGH,
        **rest: Any,
    ) -> Issue:
        """Make an issue from a statistic, its value and its limit; an empty `layer` is the whole run."""
        statistic, value, threshold = measured
        rest.setdefault("confidence", usual_confidence(kind))
        texts = {"layer": layer, "message": message, "statistic": statistic, "recommendation": recommendation}
        return cls(issue_type=kind, severity=severity, value=value, threshold=threshold, **texts, **rest)

    @property
    def key(self) -> str:
        """Name the issue within its run: two issues of one type at one layer are the same issue."""
        return f"{self.issue_type.value}:{self.layer}" if self.layer else self.issue_type.value

    def of(self, source: str) -> Issue:
        """Return the issue as one of a pair."""
        return self if self.source == source else self.model_copy(update={"source": source})

    def __str__(self) -> str:
        where = (f" at {self.layer}" if self.layer else "") + (f" of {self.source}" if self.source else "")
        about = f"explained by {self.explained_by}" if self.explained_by else doubt_about(self.confidence, None)
        cause = f" ({about})" if about else ""
        advice = f" {self.recommendation}" if self.recommendation else ""
        return f"[{self.severity.value}] {self.issue_type.value}{where}: {self.message}{cause}{advice}"


class Issues(list[Issue]):
    """A list of issues that shows a line for each, in a terminal and in a notebook."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "[]"

    def _repr_html_(self) -> str:
        return html.card(plural(len(self), "issue"), items=self)


class HealthReport(Report):
    """The open issues; `healthy` means that none of them is MEDIUM or above."""

    model_config: ClassVar[ConfigDict] = ConfigDict(revalidate_instances="always")
    """A report that it is passed to gets a copy with lists of its own, since steps share the health of their pair."""

    healthy: bool = True
    issues: list[Issue] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    recommendations: list[str] = Field(default_factory=list)

    @classmethod
    def of(cls, issues: list[Issue]) -> HealthReport:
        """Sum up the open issues."""
        if not issues:
            return HEALTHY
        advice = dict.fromkeys(issue.recommendation for issue in issues if issue.recommendation)
        return cls(
            healthy=all(issue.severity < IssueSeverity.MEDIUM for issue in issues),
            issues=issues,
            warnings=[issue.message for issue in issues],
            recommendations=list(advice),
        )

    @property
    def verdict(self) -> str:
        """Return the word for the state of health."""
        return "healthy" if self.healthy else "unhealthy"

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"  {issue}" for issue in self.issues)])

    def _repr_html_(self) -> str:
        return html.card(self.verdict, items=self.issues)


HEALTHY = HealthReport()
"""The health of every step without an open issue. It is shared, so what a user gets is a copy."""


_WORD: Final = re.compile(r"[A-Za-z_]+")


def check_issue_type(entry: str) -> None:
    """Refuse a misspelt issue type: an unknown word before a colon, or one in capitals that is close to a type."""
    word, colon, _ = entry.partition(":")
    types = [kind.value for kind in IssueType]
    if not _WORD.fullmatch(word) or word.upper() in types:
        return
    if colon or (word.isupper() and difflib.get_close_matches(word, types, n=1, cutoff=0.75)):
        close = registry.nearest(word.upper(), types) or f" There are {', '.join(types)}."
        raise ValueError(f"unknown issue type {word!r}: expected TYPE, TYPE:layer or a layer.{close}")
