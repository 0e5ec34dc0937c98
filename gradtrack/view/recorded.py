"""The statistics that a directory's journals hold, for pictures of more steps than are kept in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gradtrack.errors import JournalError
from gradtrack.record.reading import find_journals
from gradtrack.records import tail_of

_COLUMNS: Final = ("grad_variance", "grad_norm", "grad_mean", "grad_max", "grad_min")


def recorded_statistics(directory: Path, *, source: str = "", before: int) -> dict[str, list[float | None]]:
    """Return the recorded steps of a pair before one step, in the columns of `gradient_statistics.json`.

    Runs that were resumed in one directory are one training: where a run begins, those before it end.
    """
    rows: dict[int, Mapping[str, float]] = {}
    tail = tail_of(source)
    for run in _runs(directory, source, f"train/grad_variance{tail}"):
        rows = {step: metrics for step, metrics in rows.items() if step < min(run, default=step)} | run
    steps = sorted(step for step in rows if step < before)
    columns: dict[str, list[float | None]] = {"step": list(steps)}
    for name in _COLUMNS:
        columns[name] = [rows[step].get(f"train/{name}{tail}") for step in steps]
    return columns


def _runs(directory: Path, source: str, needed: str) -> list[dict[int, Mapping[str, float]]]:
    """Return the rows of each run by their steps, the oldest run first."""
    try:
        journals = [journal for journal in find_journals(directory) if journal.rank == 0]
    except JournalError:
        return []
    journals.sort(key=lambda journal: journal.run.created)
    return [
        {
            record.step: record.metrics
            for _, record in journal.rows()
            if record.source == source and needed in record.metrics
        }
        for journal in journals
    ]
