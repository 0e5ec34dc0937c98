"""What may enter a record's metrics: finite or not, but numbers under text names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from gradtrack.records import Record

_FLOAT: Final = frozenset({float})
_TEXT: Final = frozenset({str})


def is_valid(metrics: Mapping[str, float]) -> bool:
    """Say whether all metrics are plain floats under text names."""
    return _FLOAT.issuperset(map(type, metrics.values())) and _TEXT.issuperset(map(type, metrics)) and "" not in metrics


def validate(record: Record) -> tuple[Record, dict[str, str]]:
    """Return the record with its good metrics as plain floats, and why the others were left out, by name."""
    good, bad = _sort(record.metrics)
    return dataclasses.replace(record, metrics=good), bad


def _sort(metrics: Mapping[Any, Any]) -> tuple[dict[str, float], dict[str, str]]:
    good: dict[str, float] = {}
    bad: dict[str, str] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            bad[repr(name)] = "a name must be a text that is not empty"
        elif value is None or isinstance(value, (str, bytes, complex)):
            bad[name] = f"{value!r:.80} is not a number"
        else:
            try:
                good[str(name)] = float(value)
            except (TypeError, ValueError, OverflowError, RuntimeError) as fault:
                bad[name] = f"a {type(value).__name__} is not a number ({fault})"
    return good, bad
