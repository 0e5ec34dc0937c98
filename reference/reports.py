"""The page of reports: the fields of everything that a training or an analyzer returns."""

from __future__ import annotations

import inspect
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from gradtrack import registry
from gradtrack.reports import Report, StepReport, TrainingSummary
from gradtrack.reports.base import reports_in
from reference.markdown import code, table

_HEAD = """# Reports

Every report is frozen, typed, and reads like an object and like a mapping: `report.health.healthy` and
`report["health"]["healthy"]` are the same. `report.model_dump_json()` and `StepReport.model_validate_json(...)` are
exact, NaN and infinities included. `report.metrics()` returns the flat [names](metrics.md) that trackers show.
"""


def page() -> str:
    """Return the page."""
    parts = [_HEAD, "\n## Of a step\n", *map(_section, _tree(StepReport))]
    parts += ["\n## Of a training\n", *map(_section, _tree(TrainingSummary))]
    for name in registry.analyzers.builtin():
        found = [one for one in _tree(registry.analyzers.load(name).report_type) if one not in _tree(StepReport)]
        parts += [f"\n## Of the analyzer {name}\n", *map(_section, found)]
    return "".join(parts)


def _tree(report: type[Report], seen: tuple[type[Report], ...] = ()) -> list[type[Report]]:
    """Return a report and those inside of it, each once, the outer ones first."""
    found = [report]
    for field in report.model_fields.values():
        for inner in reports_in(field.annotation):
            if inner not in (*seen, *found):
                found += [one for one in _tree(inner, (*seen, *found)) if one not in found]
    return found


def _section(report: type[Report]) -> str:
    rows = [(code(name), code(_kind(field.annotation))) for name, field in report.model_fields.items()]
    about = " ".join((inspect.getdoc(report) or "").split())
    return f"\n### {report.__name__}\n\n{about}\n\n{table(('field', 'holds'), rows)}"


def _kind(annotation: Any) -> str:
    """Write a type as people say it, alike under every version of Python."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0])
    if origin is Literal:
        return " or ".join(str(one) for one in inner)
    if origin in (Union, UnionType):
        return " or ".join(map(_kind, inner))
    if inner:
        return f"{origin.__name__}[{', '.join(map(_kind, inner))}]"
    return "None" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))
