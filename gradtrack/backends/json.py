"""The statistics of a run as two JSON files of columns, which a few lines of Python can plot."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

from gradtrack.backends.base import Backend
from gradtrack.delivery.locks import Claim, claim_or_own, is_same
from gradtrack.delivery.run_files import write_atomically
from gradtrack.errors import BackendError, ClosedError
from gradtrack.records import Record, tail_of
from gradtrack.support.names import file_part
from gradtrack.support.regular_files import MEBIBYTE, MOST_MEMORY, check_json, read_regular

_GLOBAL: Final = ("variance", "mean", "norm", "max", "min")
_MATRIX: Final = ("variance", "norm", "mean")
_SHARE_OF_TIME: Final = 0.05
_MOST_BYTES: Final = 512 * MEBIBYTE
_logger = logging.getLogger("gradtrack")


@final
class JsonBackend(Backend):
    """A backend that keeps `gradient_statistics.json` and `gradient_statistics_weight_matrices.json`.

    The first holds seven lists of equal length, the second the same for each group of weights; NaN and Infinity are
    written as Python's own `json` reads them. The files are replaced as a whole, and at most a twentieth of the time is
    spent on that; `flush` and `close` always bring them up to date. A pair with a name has files of its own. A run that
    is resumed goes on in the files it finds; where it repeats a step, what they hold from there on is left behind. A
    directory that has the files of another run is left to it, with a warning: this one has one of its own inside.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._given = self._directory = None if directory is None else Path(directory)
        self._claim: Claim | None = None
        self._replayed = False
        self._series: dict[str, _Series] = {}
        self._closed = False

    def write(self, records: Sequence[Record]) -> None:
        if self._closed:
            raise ClosedError("json backend: it is closed. Make a new one for another run.")
        self._learn_directory(records)
        for record in records:
            self._of(record.source).add(record)
        for series in self._series.values():
            series.save_in_time()

    def flush(self) -> None:
        for series in self._series.values():
            series.save()

    def close(self, *, failed: bool = False) -> None:
        if not self._closed:
            self._closed = True
            try:
                self.flush()
            finally:
                if self._claim is not None:
                    self._claim.release()

    def present(self, records: Sequence[Record]) -> set[tuple[str, int]] | None:
        self._learn_directory(records)
        if self._directory is None:
            return None
        return {
            (record.source, record.step)
            for record in records
            if not _has_statistics(record) or record.step in self._of(record.source).steps
        }

    def confine(self, directory: Path) -> None:
        self._replayed = True  # the files that it finds are those of the run

    def address(self) -> Mapping[str, Any]:
        return {} if self._given is None else {"directory": os.path.abspath(self._directory or self._given)}

    @classmethod
    def probe(cls, directory: str | Path | None = None, **options: Any) -> str:
        return f"files in {'the run directory' if directory is None else os.path.abspath(directory)}"

    def _learn_directory(self, records: Sequence[Record]) -> None:
        """Take the run's directory, unless another one was given, which is then kept from other runs."""
        run = next((record.run for record in records if record.run is not None), None)
        if run is None:
            return
        if self._directory is None and run.run_dir is not None:
            self._directory = Path(run.run_dir)
        elif self._given is not None and self._claim is None and not is_same(self._given, run.run_dir):
            goes_on = self._replayed or bool(run.resumed_at)
            self._directory, self._claim = claim_or_own(
                self._given,
                run.run_id,
                what="json: directory",
                is_taken=lambda place: not goes_on and any(place.glob("gradient_statistics*.json")),
            )

    def _of(self, source: str) -> _Series:
        if source not in self._series:
            if self._directory is None:
                raise BackendError("json backend: no directory is known. Give it one with the option directory.")
            self._series[source] = _Series(self._directory, source, foreign=self._replayed)
        return self._series[source]


class _Series:
    """The columns of one pair and the two files that they go to; what the files hold already is kept."""

    def __init__(self, directory: Path, source: str, *, foreign: bool) -> None:
        tail = f".{file_part(source)}" if source else ""
        most_memory = MOST_MEMORY if foreign else None
        self._path = directory / f"gradient_statistics{tail}.json"
        self._matrix_path = directory / f"gradient_statistics_weight_matrices{tail}.json"
        self._suffix = tail_of(source)
        self._columns: dict[str, list[float]] = _read(self._path, most_memory)
        self._matrices: dict[str, dict[str, list[float]]] = _read(self._matrix_path, most_memory)
        for name in ("step", "epoch", *(f"grad_{name}" for name in _GLOBAL)):
            self._columns.setdefault(name, [])
        self.steps = set(self._columns["step"])
        self._inherited = set(self.steps)
        self._changed = False
        self._saved, self._cost = -math.inf, 0.0

    def add(self, record: Record) -> None:
        """Take in a row; one without any statistics has no place here."""
        if not _has_statistics(record):
            return
        if record.step in self._inherited:
            self._leave_behind({step for step in self._inherited if step >= record.step})
        metrics, columns, suffix = record.metrics, self._columns, self._suffix
        columns["step"].append(record.step)
        columns["epoch"].append(0 if record.epoch is None else record.epoch)
        for name in _GLOBAL:
            columns[f"grad_{name}"].append(metrics.get(f"train/grad_{name}{suffix}", math.nan))
        self.steps.add(record.step)
        self._changed = True
        prefix = f"train/grad_norm{suffix}/"
        for group in [name.removeprefix(prefix) for name in metrics if name.startswith(prefix)]:
            columns = self._matrices.setdefault(group, {name: [] for name in ("step", *_MATRIX)})
            columns["step"].append(record.step)
            for name in _MATRIX:
                columns[name].append(metrics.get(f"train/grad_{name}{suffix}/{group}", math.nan))

    def _leave_behind(self, steps: set[float]) -> None:
        """Take out rows of an earlier training, which this one does again or has given up."""
        self._inherited -= steps
        self.steps -= steps
        for columns in (self._columns, *self._matrices.values()):
            order = list(columns["step"])
            for name, values in columns.items():
                columns[name] = [value for value, step in zip(values, order, strict=False) if step not in steps]

    def save_in_time(self) -> None:
        """Write the files, unless that would take too large a share of the time."""
        if time.monotonic() - self._saved >= self._cost / _SHARE_OF_TIME:
            self.save()

    def save(self) -> None:
        """Write the files as they should be now."""
        if not self._changed:
            return
        start = time.monotonic()
        write_atomically(self._path, json.dumps(self._columns), durable=False)
        if self._matrices:
            write_atomically(self._matrix_path, json.dumps(self._matrices), durable=False)
        self._changed = False
        self._saved = time.monotonic()
        self._cost = self._saved - start


def _has_statistics(record: Record) -> bool:
    suffix = tail_of(record.source)
    return any(f"train/grad_{name}{suffix}" in record.metrics for name in _GLOBAL)


def _read(path: Path, most_memory: int | None) -> dict[str, Any]:
    """Return what a file holds; one that cannot be read is moved aside, never overwritten.

    What a replay finds is bounded, since another person may have made it: it writes every row of the journal anew. A
    training that goes on has had the same columns in memory before.
    """
    reason = "it is no object of columns"
    try:
        content = read_regular(path, most_bytes=_MOST_BYTES)
        values = json.loads(content if most_memory is None else check_json(content, most_memory=most_memory))
        if _are_columns(values) or (isinstance(values, dict) and all(map(_are_columns, values.values()))):
            return values  # type: ignore[no-any-return]
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as fault:
        reason = str(fault)
    except OSError as fault:
        if fault.errno not in (errno.EINVAL, errno.ELOOP, errno.EFBIG):  # a link, a pipe, or far too large
            raise
        reason = fault.strerror or str(fault)
    aside = path.with_suffix(f".unreadable-{time.time_ns()}")
    os.replace(path, aside)
    _logger.warning("json: %a cannot be read (%s) and is left aside as %a", path.name, reason, aside.name)
    return {}


def _are_columns(values: Any) -> bool:
    """Say whether plain data is lists of numbers by their names."""
    if not isinstance(values, dict) or not all(isinstance(column, list) for column in values.values()):
        return False
    return all(type(value) in (int, float) for column in values.values() for value in column)
