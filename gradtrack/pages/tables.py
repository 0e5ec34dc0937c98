"""A recorded run as tables of plain columns, for pandas, polars or a file."""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gradtrack.delivery.run_files import write_atomically
from gradtrack.errors import UsageError
from gradtrack.pages.run_data import LOSS, RunData, load_run
from gradtrack.records import RunInfo
from gradtrack.reports.step import spell

Table = dict[str, list[Any]]
"""Columns of one length by name; None where a row has no value."""
_KEYS: Final = ("source", "step", "time", "epoch", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTables:
    """A recorded run: who it is, its tables, and the steps of each pair after which it was resumed.

    `steps` has a row for each recorded step of each pair of model and optimizer, which is named in `source`: time,
    epoch, loss, and every metric under its name without the pair's. `issues` has a row for each time that an issue was
    open, from `opened` to `closed`, with its last text; without a step in `closed` it was open at the end.
    """

    run: RunInfo
    state: str
    steps: Table
    issues: Table
    resumed: dict[str, list[int]] = field(default_factory=dict)


def read_run(path: str | Path) -> RunTables:
    """Read the newest run of a directory as tables, or the one that `RUN_DIR@2` names, while it is running or later."""
    return tables_of(load_run(path))


def tables_of(run: RunData) -> RunTables:
    """Return a run that was read as tables."""
    return RunTables(run=run.run, state=run.state, steps=_steps(run), issues=_issues(run), resumed=run.resumed)


def _steps(run: RunData) -> Table:
    rows: list[dict[str, Any]] = []
    for source, track in run.tracks.items():
        steps = track.steps.tolist()
        columns = {"loss": LOSS, **{name: name for name in track.names if name not in _KEYS}}
        found = {"time": _cells(track.times), "epoch": _cells(track.epochs)}
        found |= {shown: _cells(track.column(name), track.lost(name)) for shown, name in columns.items()}
        for step, *row in zip(steps, *found.values(), strict=True):
            rows.append({"source": source, "step": step, **dict(zip(found, row, strict=True))})
    for line in rows:
        line["epoch"] = None if line["epoch"] is None else int(line["epoch"])
    return _table(rows, _KEYS)


def _cells(values: NDArray[np.float64], lost: NDArray[np.bool_] | None = None) -> list[float | None]:
    """Return a column with None where nothing was recorded, and NaN where that was."""
    recorded = ~np.isnan(values) if lost is None else ~np.isnan(values) | lost
    return [value if known else None for value, known in zip(values.tolist(), recorded.tolist(), strict=True)]


def _table(rows: list[dict[str, Any]], first: Sequence[str]) -> Table:
    names = dict.fromkeys([*first, *(name for row in rows for name in row)])
    return {name: _uniform([row.get(name) for row in rows]) for name in names}


def _uniform(column: list[Any]) -> list[Any]:
    """Return a column of one type beside None, as typed tables need it: floats, or texts where kinds are mixed."""
    kinds = {type(value) for value in column if value is not None}
    if kinds <= {int} and any(value is not None and abs(value) >= 2**63 for value in column):
        kinds.add(str)
    if len(kinds) < 2:
        return column
    kind = float if kinds == {int, float} else str
    return [None if value is None else kind(value) for value in column]


def _issues(run: RunData) -> Table:
    rows = [
        {"source": issue.source, "opened": start, "closed": end, **_plain(issue.last)}
        for issue in run.issues
        for start, end in issue.spans
    ]
    rows.sort(key=lambda row: (row["source"], row["opened"]))
    return _table(rows, ("source", "opened", "closed", "issue_type", "severity", "layer"))


def _plain(issue: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an issue that fit into a cell; a number is one also where the journal has a word for it."""
    words = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
    found = {}
    for name, value in issue.items():
        if isinstance(value, (str, int, float, type(None))):
            found[name] = (
                words.get(value, value) if isinstance(value, str) and name in ("value", "threshold") else value
            )
    return found


def write_table(table: Table, kind: str, path: Path) -> None:
    """Write a table as `csv`, `jsonl` or `parquet`."""
    write_atomically(path, _to_parquet(table) if kind == "parquet" else to_text(table, kind))


def to_text(table: Table, kind: str) -> str:
    """Return a table as `csv` or `jsonl`.

    A missing value is an empty cell or a key that is not there. NaN and infinities are the words nan, inf and -inf in
    csv, and NaN, Infinity and -Infinity, as texts, in jsonl.
    """
    stream = io.StringIO()
    if kind == "csv":
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
    else:
        for row in zip(*table.values(), strict=True):
            known = {name: spell(value) for name, value in zip(table, row, strict=True) if value is not None}
            stream.write(json.dumps(known, allow_nan=False) + "\n")
    return stream.getvalue()


def _to_parquet(table: Table) -> bytes:
    stream = io.BytesIO()
    with suppress(ImportError):
        arrow = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.parquet").write_table(arrow.table(table), stream)
        return stream.getvalue()
    with suppress(ImportError):
        importlib.import_module("polars").DataFrame(table, strict=False).write_parquet(stream)
        return stream.getvalue()
    raise UsageError(
        "format 'parquet': expected the package pyarrow or polars, and neither is installed. "
        "Run: pip install pyarrow. Or choose csv or jsonl."
    )
