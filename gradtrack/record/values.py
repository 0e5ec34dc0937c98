"""Metrics as the trackers can take them."""

from __future__ import annotations

from collections.abc import Mapping


def numbers(metrics: Mapping[str, object]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the metrics that are numbers as Python floats, and of the others what they are instead."""
    good: dict[str, float] = {}
    bad: dict[str, str] = {}
    for name, value in metrics.items():
        try:
            good[name] = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError) as fault:
            bad[name] = f"{type(value).__name__} ({fault})"
    return good, bad
