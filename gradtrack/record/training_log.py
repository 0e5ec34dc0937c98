"""The training log: configuration, summary and history in one JSON file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradtrack.config import GradientConfig
from gradtrack.record.files import write_json
from gradtrack.reports import StepReport, TrainingSummary


def save_training_log(
    path: Path, config: GradientConfig, summary: TrainingSummary, reports: Iterable[StepReport]
) -> Path:
    """Write what a training was set to, how it went, and its kept reports, as Python's own `json` reads it."""
    settings = config.model_dump(mode="json", exclude={"backends", "analyzers"})
    values: dict[str, Any] = {
        "format": 1,
        "config": settings,
        "summary": _plain(summary.model_dump()),
        "steps": [_plain(report.model_dump(exclude={"batch"})) for report in reports],
    }
    write_json(path, values)
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(getattr(value, "value", value))
