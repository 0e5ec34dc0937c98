"""What a user receives: the typed, frozen reports of a step and of a whole training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView, Mapping
from enum import Enum
from functools import total_ordering
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, model_serializer, model_validator
from pydantic import SerializerFunctionWrapHandler as Handler

from gradtrack import registry


class Report(BaseModel):
    """A frozen, typed result that also reads like a dictionary and keeps NaN and Inf through JSON."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="strings", protected_namespaces=()
    )

    def __getitem__(self, key: str) -> Any:
        if key in type(self).__pydantic_fields__:
            return getattr(self, key)
        raise KeyError(f"{key!r}: expected one of {', '.join(self.keys())}")

    def __contains__(self, key: object) -> bool:
        return key in type(self).__pydantic_fields__

    def keys(self) -> KeysView[str]:
        """Name the fields, so that `dict(report)` and `**report` work."""
        return type(self).__pydantic_fields__.keys()

    def get(self, key: str, default: object = None) -> Any:
        """Return one field, or the default where there is no such field."""
        return getattr(self, key) if key in self else default

    def metrics(self) -> dict[str, float]:
        """Return what the trackers plot, under its full names."""
        return {}


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
    """What is wrong with a training run."""

    VANISHING = "VANISHING"
    EXPLODING = "EXPLODING"
    DEAD = "DEAD"
    UNSTABLE = "UNSTABLE"
    NUMERICAL = "NUMERICAL"
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


class Issue(Report):
    """One finding: what, where, how it was measured and what to do about it. `layer` is empty for the whole run."""

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

    @property
    def key(self) -> str:
        """Name the issue within its run: two issues of one type at one layer are the same issue."""
        return f"{self.issue_type.value}:{self.layer}" if self.layer else self.issue_type.value

    def __str__(self) -> str:
        where = f" at {self.layer}" if self.layer else ""
        cause = f" (explained by {self.explained_by})" if self.explained_by else ""
        advice = f" {self.recommendation}" if self.recommendation else ""
        return f"[{self.severity.value}] {self.issue_type.value}{where}: {self.message}{cause}{advice}"


class HealthReport(Report):
    """The open issues; `healthy` means that none of them is MEDIUM or above."""

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

    def __str__(self) -> str:
        head = "healthy" if self.healthy else "unhealthy"
        return "\n".join([head, *(f"  {issue}" for issue in self.issues)])


HEALTHY = HealthReport()


class ClippingReport(Report):
    """What clipping did: the true norm before it, the norm after it, and how often it engages."""

    enabled: bool = True
    clip_type: str = "norm"
    clipped: bool = False
    threshold: float | None = None
    coefficient: float = 1.0
    norm_before: float | None = None
    norm_after: float | None = None
    clip_rate: float = 0.0
    clipped_fraction: float | None = None


class NonFiniteParameter(Report):
    """The non-finite elements of one named tensor."""

    name: str
    nan_count: int = 0
    positive_inf_count: int = 0
    negative_inf_count: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.nan_count} NaN, {self.positive_inf_count} +Inf, {self.negative_inf_count} -Inf)"


NonFiniteAction = Literal["none", "skip", "replace", "raise", "report", "scaler", "off", "unchecked"]


class NanInfReport(Report):
    """The non-finite elements as they were before anything was changed, and what was done about them.

    `action` is `none` when everything was finite, `scaler` when a GradScaler decides, `off` when the check is switched
    off, and `unchecked` when the step was not measured.
    """

    nan_count: int = 0
    inf_count: int = 0
    positive_inf_count: int = 0
    negative_inf_count: int = 0
    parameters: list[NonFiniteParameter] = Field(default_factory=list)
    action: NonFiniteAction = "none"
    replaced_count: int = 0


class GroupStatistics(Report):
    """The gradients of one group of parameters, over their finite elements."""

    norm: float
    mean: float
    variance: float
    min: float
    max: float
    zero_fraction: float
    element_count: int
    nan_count: int = 0
    inf_count: int = 0
    weight_norm: float | None = None


class ParameterStatistics(GroupStatistics):
    """The gradient of one parameter, over its finite elements; `aliases` are the other names of a tied parameter."""

    group: str = ""
    aliases: list[str] = Field(default_factory=list)
    touched_rows: int | None = None


class GradientStatistics(Report):
    """All gradients as one vector, before clipping and unscaled, over its finite elements.

    `variance` is the unbiased sample variance, and 0 for fewer than two elements.
    """

    total_norm: float
    mean: float
    variance: float
    std: float
    min: float
    max: float
    zero_fraction: float
    element_count: int
    nan_count: int
    inf_count: int
    missing: list[str] = Field(default_factory=list)


class StepReport(Report):
    """Everything that one look at the gradients of one training step tells.

    A report can be made before its numbers are known: `deferred` keeps a function that finds them, and the first read
    of a field calls it. On an accelerator that read is the one synchronisation of the step.
    """

    schema_version: Literal[1] = 1
    step: int
    epoch: int | None = None
    source: str = ""
    loss: float | None = None
    skipped: bool = False
    measured: bool = True
    time: float = 0.0
    lr: dict[str, float] = Field(default_factory=dict)
    batch: Any = None
    health: HealthReport = HEALTHY
    clipping: ClippingReport = Field(default_factory=ClippingReport)
    nan_inf: NanInfReport = Field(default_factory=NanInfReport)
    statistics: GradientStatistics | None = None
    groups: dict[str, GroupStatistics] = Field(default_factory=dict)
    parameters: dict[str, ParameterStatistics] = Field(default_factory=dict)
    analyzers: dict[str, SerializeAsAny[Report] | dict[str, Any]] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _type_analyzers(cls, values: object) -> object:
        """Give plain analyzer reports their own type again, where their analyzer is known."""
        if isinstance(values, dict) and values.get("analyzers"):
            typed = {name: _typed(name, report) for name, report in values["analyzers"].items()}
            return {**values, "analyzers": typed}
        return values

    @classmethod
    def deferred(cls, resolve: Callable[[], Mapping[str, Any]], **known: object) -> Self:
        """Make a report whose fields, but for the known ones, are found at the first read of one of them."""
        report = cls.__new__(cls)
        object.__setattr__(report, "__dict__", known)
        object.__setattr__(report, "__pydantic_fields_set__", set())
        object.__setattr__(report, "__pydantic_extra__", None)
        object.__setattr__(report, "__pydantic_private__", {"resolve": resolve})
        return report

    def resolve(self) -> Self:
        """Find every field now."""
        private = self.__pydantic_private__
        if private and private.get("resolve"):
            found = type(self).model_validate({**private["resolve"](), **self.__dict__})
            object.__setattr__(self, "__dict__", found.__dict__)
            object.__setattr__(self, "__pydantic_fields_set__", found.__pydantic_fields_set__)
            object.__setattr__(self, "__pydantic_private__", None)
        return self

    def __getattr__(self, name: str) -> Any:
        if name in type(self).__pydantic_fields__:
            return self.resolve().__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    @model_serializer(mode="wrap")
    def _serialize(self, handler: Handler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self.resolve())
        return values

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StepReport):
            other.resolve()
        return super(StepReport, self.resolve()).__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        yield from self.resolve().__dict__.items()

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield from super(StepReport, self.resolve()).__repr_args__()

    def __getstate__(self) -> dict[Any, Any]:
        return super(StepReport, self.resolve()).__getstate__()

    def __copy__(self) -> Self:
        return super(StepReport, self.resolve()).__copy__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return super(StepReport, self.resolve()).__deepcopy__(memo)

    def metrics(self) -> dict[str, float]:
        """Return the flat metrics of the step, `train/grad_*` first and then those of every analyzer."""
        tail = f"/{self.source}" if self.source else ""
        values = {f"train/grad_{name}{tail}": value for name, value in self._global_metrics().items()}
        for group, found in self.groups.items():
            values[f"train/grad_norm{tail}/{group}"] = found.norm
            values[f"train/grad_variance{tail}/{group}"] = found.variance
            values[f"train/grad_mean{tail}/{group}"] = found.mean
        for report in self.analyzers.values():
            if isinstance(report, Report):
                values.update((f"{name}{tail}", value) for name, value in report.metrics().items())
        return values

    def _global_metrics(self) -> dict[str, float]:
        clipping, found = self.clipping, self.statistics
        values: dict[str, float] = {}
        if clipping.norm_before is not None:
            values["norm"] = clipping.norm_before
        if clipping.enabled and clipping.norm_after is not None:
            values["norm_clipped"] = clipping.norm_after
        if found is not None:
            values |= {"variance": found.variance, "mean": found.mean, "std": found.std}
            values |= {"max": found.max, "min": found.min, "zero_fraction": found.zero_fraction}
        if self.nan_inf.action not in ("off", "unchecked"):
            values |= {"nan_count": self.nan_inf.nan_count, "inf_count": self.nan_inf.inf_count}
        if clipping.enabled:
            values |= {"clip_coef": clipping.coefficient, "clip_rate": clipping.clip_rate}
            if clipping.threshold is not None:
                values["clip_threshold"] = clipping.threshold
        values |= {"skipped": float(self.skipped), "healthy": float(self.health.healthy)}
        for issue in self.health.issues:
            name = f"issues/{issue.issue_type.value.lower()}"
            values[name] = values.get(name, 0.0) + 1.0
        return values


def _typed(name: str, report: object) -> object:
    if not isinstance(report, dict):
        return report
    try:
        report_type = registry.analyzers.load(name).report_type
    except Exception:
        return report
    return report_type.model_validate(report)


class NormSummary(Report):
    """The finite pre-clip norms of a training."""

    count: int = 0
    mean: float = 0.0
    std: float = 0.0
    min: float = 0.0
    max: float = 0.0
    last: float = 0.0


class GradientSummary(Report):
    """The statistics of all gradients of a training."""

    gradient_norms: NormSummary = NormSummary()


class HealthSummary(Report):
    """How many steps were unhealthy, and how often each type of issue was open."""

    unhealthy_steps: int = 0
    issues: dict[str, int] = Field(default_factory=dict)


class NanInfSummary(Report):
    """Non-finite elements seen, elements replaced and steps skipped in a training."""

    nan_count: int = 0
    inf_count: int = 0
    nonfinite_steps: int = 0
    total_replacements: int = 0
    skipped_steps: int = 0


class ClippingSummary(Report):
    """How often clipping engaged in a training."""

    clipped_steps: int = 0
    clip_rate: float = 0.0


class TrainingSummary(Report):
    """A training so far, in the layout of its keys: steps, norms, health, non-finite values and clipping."""

    total_steps: int = 0
    gradient_statistics: GradientSummary = GradientSummary()
    health_issues: HealthSummary = HealthSummary()
    nan_inf_summary: NanInfSummary = NanInfSummary()
    clipping_summary: ClippingSummary = ClippingSummary()
