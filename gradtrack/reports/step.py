"""The report of one step, whose numbers may be found at the first read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SerializationInfo,
    SerializeAsAny,
    TypeAdapter,
    field_serializer,
    model_serializer,
)
from pydantic import SerializerFunctionWrapHandler as Handler

from gradtrack import registry
from gradtrack.records import Metric
from gradtrack.reports import html
from gradtrack.reports.base import Report
from gradtrack.reports.issues import HealthReport
from gradtrack.reports.metric_names import CORE_METRICS, flat_metrics
from gradtrack.reports.summary import (
    ClippingReport,
    GradientStatistics,
    GroupStatistics,
    NanInfReport,
    ParameterStatistics,
    RankStatistics,
    ScalerReport,
    SpikeReport,
    has_finite,
)

_NONE_SET: Final[set[str]] = set()
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_set: Final = object.__setattr__
_VALUES: Final[Any] = BaseModel.__dict__["__dict__"]
"""Where a model keeps its values, without the property of the same name that finds them first."""


class StepReport(Report):
    """The report on the gradients of one training step.

    A report can be made before its numbers are known: `deferred` keeps a function that finds them, and the first read
    of a field calls it. Each field is then made when it is read. On an accelerator that first read is the one
    synchronisation of the step.
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
    health: HealthReport = Field(default_factory=HealthReport)
    clipping: ClippingReport = Field(default_factory=ClippingReport)
    nan_inf: NanInfReport = Field(default_factory=NanInfReport)
    statistics: GradientStatistics | None = None
    groups: dict[str, GroupStatistics] = Field(default_factory=dict)
    parameters: dict[str, ParameterStatistics] = Field(default_factory=dict)
    ranks: RankStatistics | None = None
    scaler: ScalerReport | None = None
    spike: SpikeReport | None = None
    analyzers: Annotated[
        dict[str, SerializeAsAny[Report] | dict[str, Any]], BeforeValidator(lambda found: _typed(found))
    ] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

    @classmethod
    def deferred(
        cls, resolve: Callable[[], Mapping[str, Any]], shared: Mapping[str, Any] = _NOTHING, **known: object
    ) -> Self:
        """Make a report whose other fields are found when they are read.

        `resolve` is called once, for a mapping that may make each field when it is looked up. It also has those that
        are `shared` with other reports, which are read without it.
        """
        report = cls.__new__(cls)
        _VALUES.__set__(report, known)
        _set(report, "__pydantic_fields_set__", _NONE_SET)  # replaced when all fields are found
        _set(report, "__pydantic_extra__", None)
        _set(report, "__pydantic_private__", {"resolve": resolve, "shared": shared})
        return report

    def defer_to(self, resolve: Callable[[], Mapping[str, Any]]) -> None:
        """Find the fields by another function from now on, unless they are found already."""
        private = self.__pydantic_private__
        if private:
            private["resolve"] = resolve

    def resolve(self) -> Self:
        """Find every field now."""
        if self.__pydantic_private__:
            fields, values = self._fields(), _VALUES.__get__(self).copy()
            found = type(self).model_validate({name: fields[name] for name in fields if name not in values} | values)
            read = {name: values[name] for name in fields if name in values}  # stays the same object
            _VALUES.__set__(self, {**_VALUES.__get__(found), **read})
            _set(self, "__pydantic_fields_set__", found.__pydantic_fields_set__)
            _set(self, "__pydantic_private__", None)
        return self

    def _fields(self) -> Any:
        """Return the fields that are not validated yet, or the report if all of them are."""
        private = self.__pydantic_private__
        if not private:
            return self
        if "fields" not in private:
            private["fields"] = private["resolve"]()
        return private["fields"]

    @property
    def __dict__(self) -> dict[str, Any]:
        """Resolve for pydantic and `vars`, which read all values of a report from here."""
        values: dict[str, Any] = _VALUES.__get__(self.resolve())
        return values

    @__dict__.setter
    def __dict__(self, values: dict[str, Any]) -> None:
        _VALUES.__set__(self, values)

    @property
    def model_fields_set(self) -> set[str]:
        """Name the fields that were not left at their defaults."""
        return super(StepReport, self.resolve()).model_fields_set

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).__pydantic_fields__:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        private = self.__pydantic_private__
        try:
            found = (private["shared"] if private and name in private["shared"] else self._fields())[name]
        except KeyError:  # it keeps its default, which is not to count as set
            return vars(self)[name]
        return _VALUES.__get__(self).setdefault(name, _validator(type(self), name)(found))

    @field_serializer("batch", when_used="json")
    def _serialize_batch(self, batch: Any) -> Any:
        """Keep what JSON can hold, and the text of anything else."""
        try:
            json.dumps(batch)
        except (TypeError, ValueError):
            return repr(batch)
        return batch

    @model_serializer(mode="wrap")
    def _serialize(self, handler: Handler, info: SerializationInfo) -> dict[str, Any]:
        """Resolve before dumping; what a wrap serializer returns follows the outermost model's setting for NaN."""
        values: dict[str, Any] = handler(self.resolve())
        return {name: spell(value) for name, value in values.items()} if info.mode == "json" else values

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StepReport):
            other.resolve()
        return super(StepReport, self.resolve()).__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[Any, Any]:
        return super(StepReport, self.resolve()).__getstate__()

    def __copy__(self) -> Self:
        return super(StepReport, self.resolve()).__copy__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return super(StepReport, self.resolve()).__deepcopy__(memo)

    def __str__(self) -> str:
        clipping = self.clipping
        of, clipped = f" of {self.source}" if self.source else "", " (clipped)" if clipping.clipped else ""
        known = (self.loss, clipping.norm_before, clipping.norm_after)
        loss, before, after = ("unknown" if value is None else f"{value:.6g}" for value in known)
        notes = "".join(f"\n  note: {note}" for note in self.notes)
        return f"step {self.step}{of}: loss {loss}, gradient norm {before} -> {after}{clipped}, {self.health}{notes}"

    def _repr_html_(self) -> str:
        clipping = self.clipping
        rows = [
            ("loss", self.loss),
            ("gradient norm", clipping.norm_before),
            ("after clipping", clipping.norm_after),
            ("NaN / Inf", f"{self.nan_inf.nan_count} / {self.nan_inf.inf_count} ({self.nan_inf.action})"),
        ]
        groups = [
            (name, *((found.norm, found.mean, found.variance) if has_finite(found) else (None,) * 3))
            for name, found in self.groups.items()
        ]
        table = html.grid(("group", "norm", "mean", "variance"), groups)
        title = f"Step {self.step}{f' of {self.source}' if self.source else ''}: {self.health.verdict}"
        return html.card(title, rows, items=[*self.health.issues, *self.notes], table=table)

    described: ClassVar[tuple[Metric, ...]] = CORE_METRICS

    def metrics(self) -> dict[str, float]:
        """Return the flat metrics of the step, `train/grad_*` first and then those of every analyzer."""
        fields = self._fields()
        if fields is self or not hasattr(fields, "metrics"):
            return flat_metrics(fields, self.step, self.source)
        found: dict[str, float] = fields.metrics(self.step, self.source)
        return found


@cache
def _validator(report: type[StepReport], name: str) -> Callable[[object], Any]:
    """Return a function that validates one field as a report validates it."""
    field = report.__pydantic_fields__[name]
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, field])  # type: ignore[arg-type]
    return adapter.validator.validate_python


def _typed(found: object) -> object:
    """Give plain analyzer reports their own type again, where their analyzer is known."""
    return {name: _typed_one(name, one) for name, one in found.items()} if isinstance(found, dict) else found


def _typed_one(name: str, report: object) -> object:
    if not isinstance(report, dict):
        return report
    try:
        report_type = registry.analyzers.load(name).report_type
    except Exception:
        return report
    return report_type.model_validate(report)


def spell(value: Any) -> Any:
    """Write NaN and infinities as the words that `ser_json_inf_nan="strings"` uses."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: spell(entry) for name, entry in value.items()}
    return [spell(entry) for entry in value] if isinstance(value, list) else value
