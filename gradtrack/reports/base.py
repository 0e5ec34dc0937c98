"""The base of every report."""

from __future__ import annotations

import math
from collections.abc import KeysView, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from gradtrack.records import Metric
from gradtrack.reports import html


class Report(BaseModel):
    """A frozen, typed result that also reads like a dictionary and keeps NaN and Inf through JSON."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="strings", protected_namespaces=()
    )

    described: ClassVar[tuple[Metric, ...]] = ()
    """A sentence on every name that `metrics` can return."""

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

    def _repr_html_(self) -> str:
        if type(self).__str__ is not BaseModel.__str__:
            return html.text(str(self))
        rows = [(name, self[name]) for name in self.keys() if _is_plain(self[name])]
        tables = "".join(_table(name, self[name]) for name in self.keys())
        return html.card(type(self).__name__, rows, table=tables)

    def metrics(self) -> dict[str, float]:
        """Return what the trackers plot, under its full names."""
        return {}


class LateReport(Report):
    """A report on an earlier step, whose numbers exist only after the optimizer has stepped; recorded under `step`."""

    step: int


def finite_only(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics that are known and that a chart can show."""
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


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
