"""The base of every report: dictionary access, metrics declared on fields, and HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator, KeysView, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from gradtrack.records import Metric
from gradtrack.reports import html


def measured(name: str, meaning: str, *, unit: str = "", when: str = "", default: float | None = None) -> Any:
    """Return the default of a report's field whose value is a metric."""
    field: FieldInfo = Field(default)  # type: ignore[assignment]
    field.metadata.append(Metric(name, meaning, unit=unit, when=when))
    return field


class _Described:
    """The metrics that a class of reports declares."""

    def __get__(self, report: object, owner: type[Report]) -> tuple[Metric, ...]:
        return _described(owner)


class Report(BaseModel):
    """A frozen, typed result that also reads like a dictionary and keeps NaN and Inf through JSON.

    A metric is declared on its field: `share: float | None = measured("own/share", "What it is.", unit="share")`, or
    `Annotated[float, Metric(...)]` as the type of a field without a default or of a property. Where other reports hold
    this one in a dictionary or a list, `<...>` in the metric's name stands for the key, or for the entry's `name`.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="strings", protected_namespaces=()
    )

    described: ClassVar[tuple[Metric, ...]] = _Described()  # type: ignore[assignment]
    """A sentence on every name that `metrics` can return: what is declared, unless a class writes both by hand."""

    aliases_of_fields: ClassVar[Mapping[str, str]] = {}
    """Other names that a key may have, with those of their fields."""

    def __getitem__(self, key: str) -> Any:
        if key in self:
            return getattr(self, key)
        raise KeyError(f"{key!r}: expected one of {', '.join(self.keys())}")

    def __contains__(self, key: object) -> bool:
        return key in type(self).__pydantic_fields__ or key in self.aliases_of_fields

    def keys(self) -> KeysView[str]:
        """Name the fields, so that `dict(report)` and `**report` work."""
        return type(self).__pydantic_fields__.keys()

    def get(self, key: str, default: object = None) -> Any:
        """Return one field, or the default where there is no such field."""
        return getattr(self, key) if key in self else default

    def _repr_html_(self) -> str:
        if type(self).__str__ is not BaseModel.__str__:
            return html.text(str(self))
        rows = [(name, self[name]) for name in self.keys() if _is_plain(self[name])]
        tables = "".join(_table(name, self[name]) for name in self.keys())
        return html.card(type(self).__name__, rows, table=tables)

    def metrics(self) -> dict[str, float]:
        """Return what the trackers plot, under its full names: the declared metrics that are known and finite."""
        values = declared_values(self).items()
        return {name: value for name, value in values if value is not None and math.isfinite(value)}

    def metric_parts(self) -> Iterator[tuple[str | None, Report]]:
        """Return the inner reports that declare metrics, each with the name that `<...>` in theirs stands for."""
        for field in _parts(type(self)):
            value = getattr(self, field)
            if isinstance(value, Mapping):
                entries = list(value.items())
            elif _is_list(value):
                entries = [(getattr(entry, "name", str(place)), entry) for place, entry in enumerate(value)]
            else:
                entries = [(None, value)]
            yield from ((name, entry) for name, entry in entries if isinstance(entry, Report))


class LateReport(Report):
    """A report on an earlier step, whose numbers exist only after the optimizer has stepped; recorded under `step`."""

    step: int


def declared_values(report: Report) -> dict[str, float | None]:
    """Return every declared metric of a report and of its parts; a label is its place in its `Literal`, from 0."""
    found = {one.metric.name: one.number(getattr(report, one.attribute)) for one in _declared(type(report))}
    for name, part in report.metric_parts():
        values = declared_values(part)
        if name is not None:
            values = {Metric.filled(metric, name): value for metric, value in values.items() if "<" in metric}
        found |= values
    return found


def reports_in(annotation: Any) -> Iterator[type[Report]]:
    """Find the classes of reports that a type names."""
    if isinstance(annotation, type) and issubclass(annotation, Report) and annotation is not Report:
        yield annotation
    for inner in get_args(annotation):
        yield from reports_in(inner)


class _Declaration(NamedTuple):
    """A metric, the field or property with its value, and the labels of which that is one."""

    metric: Metric
    attribute: str
    labels: tuple[str, ...]

    def number(self, value: Any) -> float | None:
        """Return what a tracker plots of a value."""
        if isinstance(value, str):
            return float(self.labels.index(value))
        return None if value is None else float(value)


@cache
def _declared(report: type[Report]) -> tuple[_Declaration, ...]:
    """Return the metrics that a class declares itself."""
    fields = {name: (field.annotation, field.metadata) for name, field in report.__pydantic_fields__.items()}
    return tuple(
        _Declaration(metric, name, _labels(annotation))
        for name, (annotation, metadata) in (fields | dict(_properties(report))).items()
        for metric in metadata
        if isinstance(metric, Metric)
    )


@cache
def _parts(report: type[Report]) -> tuple[str, ...]:
    """Name the fields that hold reports with metrics."""
    fields = report.__pydantic_fields__.items()
    return tuple(name for name, field in fields if any(map(_described, reports_in(field.annotation))))


def _described(report: type[Report], outer: tuple[type[Report], ...] = ()) -> tuple[Metric, ...]:
    """Return the metrics that a class declares, and then those of the reports in its fields."""
    outer = (*outer, report)
    own = (one.metric for one in _declared(report))
    inside = (inner for field in report.__pydantic_fields__.values() for inner in reports_in(field.annotation))
    parts = (metric for inner in inside if inner not in outer for metric in _described(inner, outer))
    return tuple(dict.fromkeys((*own, *parts)))


def _properties(report: type[Report]) -> Iterator[tuple[str, tuple[Any, Sequence[object]]]]:
    """Return the type of every property that is annotated, and its annotations."""
    members = {name: member for base in reversed(report.__mro__) for name, member in vars(base).items()}
    for name, member in members.items():
        if isinstance(member, property):
            with suppress(Exception):  # a plugin may import types for the type checker alone
                returned = get_type_hints(member.fget, include_extras=True).get("return")
                if get_origin(returned) is Annotated:
                    yield name, (get_args(returned)[0], get_args(returned)[1:])


def _labels(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(label for inner in get_args(annotation) for label in _labels(inner))


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _table(name: str, values: Any) -> str:
    """Return the reports in a field, or nothing where it holds no reports."""
    entries = list(values.items()) if isinstance(values, dict) else list(enumerate(values)) if _is_list(values) else []
    if not entries or not all(isinstance(entry, Report) for _, entry in entries):
        return ""
    fields = type(entries[0][1]).__pydantic_fields__
    columns = [field for field in fields if all(_is_plain(entry.get(field)) for _, entry in entries)]
    return html.grid([name, *columns], ([key, *(entry.get(field) for field in columns)] for key, entry in entries))


def _is_list(values: object) -> bool:
    return isinstance(values, (list, tuple))
