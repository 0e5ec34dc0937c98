"""The base of every report."""

from __future__ import annotations

from collections.abc import KeysView
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from gradtrack.records import Metric


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

    def metrics(self) -> dict[str, float]:
        """Return what the trackers plot, under its full names."""
        return {}


class LateReport(Report):
    """A report on an earlier step, whose numbers exist only after the optimizer has stepped; recorded under `step`."""

    step: int
