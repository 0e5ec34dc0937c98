"""Records as lines of JSON and back, exactly, with NaN and Infinity as Python's own `json` writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

from pydantic_core import to_json

from gradtrack.records import Histogram, Panel, PanelKind, Record, RunInfo
from gradtrack.support.redact import redact_values
from gradtrack.support.regular_files import MEBIBYTE, check_json, is_inside

_encode_any = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=str).encode
_MOST_ROWS: Final = 2**63
_MOST_MEMORY: Final = 256 * MEBIBYTE
"""Of a row. One with four metrics of 100,000 groups has less."""
_MOST_ISSUES: Final = 1000
_LATEST: Final = 1e12
"""In seconds since 1970: some 30,000 years from now."""
_KINDS: Final = frozenset(get_args(PanelKind))


def encode_row(number: int, record: Record, directory: Path) -> bytes:
    """Write a record as one line; its run is in the journal's header."""
    metrics = record.metrics
    row: dict[str, Any] = {
        "n": number,
        "step": record.step,
        "time": record.time,
        "metrics": metrics if type(metrics) is dict else dict(metrics),
    }
    if record.epoch is not None:
        row["epoch"] = record.epoch
    if record.loss is not None:
        row["loss"] = record.loss
    if record.source:
        row["source"] = record.source
    if record.issues:
        row["issues"] = [dict(issue) for issue in record.issues]
    if record.panels:
        row["panels"] = [
            [panel.title, panel.section, list(panel.metrics), panel.kind, panel.log_scale] for panel in record.panels
        ]
    if record.histograms:
        row["histograms"] = {name: [list(found.edges), list(found.counts)] for name, found in record.histograms.items()}
    if record.files:
        row["files"] = [_shorten(name, directory) for name in record.files]
    if record.caveats:
        row["caveats"] = list(record.caveats)
    return to_line(row)


def decode_row(line: bytes, directory: Path, *, trusted: bool) -> tuple[int, Record]:
    """Read a whole row back, or raise ValueError; an untrusted line names no file outside of its directory."""
    try:
        row = json.loads(check_json(line, most_memory=_MOST_MEMORY))
        number = row["n"]
        if type(number) is not int or not 0 <= number < _MOST_ROWS:
            raise ValueError(f"row number {number!r:.40}: expected a count")
        return number, _record(row, directory, trusted=trusted)
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as fault:
        raise ValueError(f"not a row of a journal: {fault!r}") from None


def encode_run(run: RunInfo) -> dict[str, Any]:
    """Return a run's identity as plain data without secrets."""
    return {
        "run_id": run.run_id,
        "run_dir": run.run_dir,
        "created": run.created,
        "config": redact_values(run.config),
        "environment": redact_values(run.environment),
        **({"resumed_from": run.resumed_from, "resumed_at": dict(run.resumed_at)} if run.resumed_at else {}),
    }


def decode_run(values: Mapping[str, Any], directory: Path) -> RunInfo:
    """Read a run's identity back; its directory is where the journal lies now."""
    return RunInfo(
        run_id=str(values["run_id"]),
        run_dir=str(directory),
        created=_time(values["created"]),
        config=dict(values["config"]),
        environment={str(key): str(value) for key, value in values["environment"].items()},
        resumed_from=str(values.get("resumed_from", "")),
        resumed_at={str(key): int(value) for key, value in values.get("resumed_at", {}).items()},
    )


def to_line(values: Mapping[str, Any]) -> bytes:
    """Write plain data as one line; what is no plain data is written as its text."""
    try:
        line = to_json(values, inf_nan_mode="constants", fallback=str)  # nine times as fast as Python's own
    except ValueError:  # a text that is not Unicode, as names of files can be
        line = b""
    if line and line.isascii():
        return line + b"\n"
    return f"{_encode_any(dict(values))}\n".encode("ascii")


def _record(row: Mapping[str, Any], directory: Path, *, trusted: bool) -> Record:
    epoch, metrics = row.get("epoch"), row["metrics"]
    if epoch is not None and (type(epoch) is not int or not -_MOST_ROWS <= epoch < _MOST_ROWS):
        raise TypeError(f"epoch {epoch!r:.40}: expected a number of 64 bits")
    if "" in metrics:
        raise ValueError("a metric has no name")
    files = (_lengthen(str(name), directory, trusted=trusted) for name in row.get("files", ()))
    return Record(
        step=row["step"],
        time=_time(row["time"]),
        metrics={name: _number(value) for name, value in metrics.items()},
        epoch=epoch,
        loss=None if row.get("loss") is None else _number(row["loss"]),
        source=str(row.get("source", "")),
        panels=tuple(_panel(values) for values in row.get("panels", ())),
        issues=tuple(dict(issue) for issue in row.get("issues", ())[: None if trusted else _MOST_ISSUES]),
        histograms={
            name: Histogram(edges=tuple(map(_number, edges)), counts=tuple(map(_number, counts)))
            for name, (edges, counts) in row.get("histograms", {}).items()
        },
        files=tuple(name for name in files if name is not None),
        caveats=tuple(map(str, row.get("caveats", ()))),
    )


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise TypeError(f"metric {value!r:.40}: expected a number")
    return float(value)


def _time(value: Any) -> float:
    if not -_LATEST < _number(value) < _LATEST:
        raise ValueError(f"time {value!r:.40}: expected seconds since 1970")
    return float(value)


def _panel(values: Any) -> Panel:
    title, section, metrics, kind, log_scale = values
    if kind not in _KINDS:
        raise TypeError(f"panel kind {kind!r}: expected one of {sorted(_KINDS)}")
    return Panel(
        title=str(title), section=str(section), metrics=tuple(map(str, metrics)), kind=kind, log_scale=bool(log_scale)
    )


def _shorten(name: str, directory: Path) -> str:
    """Make a path inside of the directory relative, so that a run can be moved."""
    absolute, root = os.path.abspath(name), os.path.abspath(directory)
    return os.path.relpath(absolute, root) if absolute.startswith(root + os.sep) else absolute


def _lengthen(name: str, directory: Path, *, trusted: bool) -> str | None:
    """Find a path again; an untrusted one is dropped unless it lies, and leads to a file, below the directory."""
    path = directory / name
    if trusted:
        return str(path)
    below = Path(os.path.abspath(path)).is_relative_to(os.path.abspath(directory))
    return str(path) if below and is_inside(path, directory) else None
