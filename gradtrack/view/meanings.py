"""What the metrics of analyzers mean, for whoever sees a chart and not the reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

from gradtrack import registry
from gradtrack.records import Metric

_TOLD: Final = 4


def explain(lines: Sequence[tuple[str, str]]) -> str:
    """Say what the lines of a chart are, each given by its name and its metric; nothing where that is not known."""
    known = {meaning: name for name, metric in reversed(lines) if (meaning := meaning_of(metric))}
    told = [(name, meaning) for meaning, name in reversed(known.items())]
    if len(told) == 1:
        return told[0][1]
    return " ".join(f"{name}: {meaning}" for name, meaning in told) if len(told) <= _TOLD else ""


@cache
def meaning_of(metric: str) -> str:
    """Return the sentence on a metric of an analyzer that is part of gradtrack; empty of any other."""
    found = next((one for one in _described() if one.matches(metric)), None)
    if found is None:
        return ""
    return f"{found.meaning.removesuffix('.')} ({found.unit})." if found.unit else found.meaning


@cache
def _described() -> tuple[Metric, ...]:
    analyzers = [registry.analyzers.load(name) for name in registry.analyzers.builtin()]
    return tuple(metric for analyzer in analyzers for metric in analyzer.report_type.described)
