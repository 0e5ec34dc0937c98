"""The data of one run, read from its directory for whoever shows it."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gradtrack.errors import JournalError
from gradtrack.progress import Bar
from gradtrack.record.journal import is_being_written
from gradtrack.record.reading import find_journals
from gradtrack.record.run_end import RUN_END, RunEnd
from gradtrack.records import Panel, Record, RunInfo
from gradtrack.reports import IssueSeverity

_GROUP_NORM: Final = "train/grad_norm/"
_HEALTHY: Final = "train/grad_healthy"
_LOSS: Final = "loss"
_SPANS: Final = 3
_OVER_FINITE: Final = re.compile(r"train/grad_(?:norm(?=/)|variance)(|/.*)$", re.DOTALL)


class Track:
    """The recorded steps of one (model, optimizer) pair as columns of numbers; what a row lacks is NaN.

    The columns and the metrics of its panels are called without the name of the pair. A step that was
    recorded twice, as some findings are known one step late and as a resumed run repeats steps, is one row with what
    came last.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._rows: dict[int, int] = {}
        self._loss = array("d")
        self._columns: dict[str, array[float]] = {}
        self._nan_steps: dict[str, set[int]] = {}
        self._panels: dict[Panel, None] = {}

    def add(self, record: Record) -> None:
        """Take in one row."""
        row = self._rows.setdefault(record.step, len(self._rows))
        if record.loss is not None:
            self._set(self._loss, row, record.loss, record.step, _LOSS)
        for name, value in record.metrics.items():
            own = self._without_source(name)
            column = self._columns.get(own)
            if column is None:
                column = self._columns[own] = array("d")
            self._set(column, row, value, record.step, own)
        for panel in record.panels:
            own_metrics = tuple(map(self._without_source, panel.metrics))
            self._panels[replace(panel, metrics=own_metrics)] = None

    @property
    def steps(self) -> NDArray[np.int64]:
        """Return the step of every row, in order."""
        return np.array(sorted(self._rows), dtype=np.int64)

    @property
    def loss(self) -> NDArray[np.float64]:
        """Return the loss of every row."""
        return self._in_order(self._loss)

    @property
    def names(self) -> list[str]:
        """Name the metrics, in the order in which they appeared."""
        return list(self._columns)

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Return the panels that the pair declared, in a section of its own where it has a name."""
        return tuple(self._panels)

    @property
    def groups(self) -> list[str]:
        """Name the groups of parameters, in the order of the model."""
        return [name.removeprefix(_GROUP_NORM) for name in self._columns if name.startswith(_GROUP_NORM)]

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a metric at every row."""
        return self._in_order(self._columns.get(name, array("d")))

    def over_finite(self, name: str) -> NDArray[np.float64]:
        """Return a metric as `column` does, but for a norm or a variance NaN where no gradient element was finite.

        Over no element at all both are 0, and the mean is not a number.
        """
        values, found = self.column(name), _OVER_FINITE.match(name)
        if found is None or f"train/grad_mean{found[1]}" not in self._columns:
            return values
        return np.where((values == 0.0) & np.isnan(self.column(f"train/grad_mean{found[1]}")), math.nan, values)

    def last(self, name: str) -> float | None:
        """Return a metric as it was last recorded, be it a number or not; None is one that never was."""
        return self._last_recorded(name, self.column(name), self.over_finite(name))

    def last_loss(self) -> float | None:
        """Return the loss that was last recorded, be it a number or not; None is none at all."""
        return self._last_recorded(_LOSS, self.loss, self.loss)

    def nan_steps(self, name: str) -> list[int]:
        """Return the steps at which a metric was recorded and is not a number."""
        rows = np.flatnonzero(np.isnan(self.column(name)))
        return sorted(self._nan_steps.get(name, set()) & set(self.steps[rows].tolist()))

    def nan_losses(self) -> list[int]:
        """Return the steps at which the loss is not a number."""
        rows = np.flatnonzero(np.isnan(self.loss))
        return sorted(self._nan_steps.get(_LOSS, set()) & set(self.steps[rows].tolist()))

    def last_norm(self, group: str) -> float:
        """Return the last norm of a group that was over a finite gradient."""
        return _last_known(self.over_finite(f"{_GROUP_NORM}{group}"))

    def end_of(self, values: NDArray[np.float64]) -> tuple[float, int | None]:
        """Return the last number of a column, and its step where a later row has none."""
        known = np.flatnonzero(~np.isnan(values))
        if not len(known):
            return math.nan, None
        row = int(known[-1])
        return float(values[row]), None if row + 1 == len(values) else int(self.steps[row])

    def _last_recorded(self, name: str, recorded: NDArray[np.float64], shown: NDArray[np.float64]) -> float | None:
        there = ~np.isnan(recorded)
        if name in self._nan_steps:
            there |= np.isin(self.steps, list(self._nan_steps[name]))
        rows = np.flatnonzero(there)
        return float(shown[rows[-1]]) if len(rows) else None

    def _set(self, column: array[float], row: int, value: float, step: int, name: str) -> None:
        if math.isnan(value):
            # In a column it looks like a gap.
            self._nan_steps.setdefault(name, set()).add(step)
        if row == len(column):
            column.append(value)
            return
        if row > len(column):
            column.extend([math.nan] * (row + 1 - len(column)))
        column[row] = value

    def _in_order(self, column: array[float]) -> NDArray[np.float64]:
        values = np.full(len(self._rows), math.nan)
        values[: len(column)] = column
        order = np.fromiter(self._rows, dtype=np.int64, count=len(self._rows)).argsort()
        return values[order]

    def _without_source(self, name: str) -> str:
        if not self.name:
            return name
        head, found, group = name.partition(f"/{self.name}/")
        return f"{head}/{group}" if found else name.removesuffix(f"/{self.name}")


def _last_known(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else math.nan


@dataclass(slots=True, kw_only=True)
class IssueHistory:
    """An issue of a run: its latest text and the steps between which it was open; None is an end not reached."""

    key: str
    source: str
    latest: Mapping[str, Any]
    severity: IssueSeverity
    spans: list[tuple[int, int | None]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether the issue was open at the end."""
        return self.spans[-1][1] is None

    @property
    def is_cause(self) -> bool:
        """Whether no other issue explains it."""
        return not self.latest.get("explained_by")

    @property
    def first_step(self) -> int:
        """Return the step on which it opened first."""
        return self.spans[0][0]

    @property
    def when(self) -> str:
        """Tell in words when it was open."""
        spans = [f"{start} to {end}" for start, end in self.spans if end is not None]
        told = [f"steps {', '.join(spans[:_SPANS])}"] if spans else []
        if len(spans) > _SPANS:
            told.append("once more" if len(spans) == _SPANS + 1 else f"{len(spans) - _SPANS} times more")
        if self.is_open:
            told.append(f"from step {self.spans[-1][0]}")
        return told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"


@dataclass(slots=True, kw_only=True)
class RunData:
    """One run: its identity, its rows as columns, its issues, and what was known when it ended."""

    run: RunInfo
    directory: Path
    tracks: dict[str, Track]
    issues: list[IssueHistory]
    end: RunEnd | None = None
    is_running: bool = False
    damaged: list[str] = field(default_factory=list)

    @property
    def total_steps(self) -> int:
        """Return how many steps were taken, as far as is known."""
        if self.end is not None:
            return self.end.summary.total_steps
        return max((int(track.steps.max()) for track in self.tracks.values() if len(track.steps)), default=0)

    @property
    def state(self) -> str:
        """Tell in a word or two whether the run goes on or how it ended."""
        if self.end is not None:
            return "failed" if self.end.failed else "ended"
        return "running" if self.is_running else "stopped without an end"

    @property
    def open_issues(self) -> list[IssueHistory]:
        """Return the issues that were open at the end."""
        return [issue for issue in self.issues if issue.is_open]

    @property
    def left_out(self) -> str:
        """Say how many rows cannot be read; nothing where all can."""
        count = len(self.damaged)
        return f"{count} damaged row{'' if count == 1 else 's'} left out" if count else ""

    @property
    def healthy(self) -> bool:
        """Whether no issue of MEDIUM or above was open at the end."""
        return all(issue.severity < IssueSeverity.MEDIUM for issue in self.open_issues)

    @classmethod
    def of(cls, run: RunInfo, directory: Path, records: Iterable[Record]) -> RunData:
        """Gather the rows of a run, with what its directory says about its end."""
        tracks: dict[str, Track] = {}
        issues = _Issues()
        for record in records:
            tracks.setdefault(record.source, Track(record.source)).add(record)
            issues.add(record)
        end = RunEnd.load(directory / RUN_END)
        return cls(
            run=run,
            directory=directory,
            tracks=tracks,
            issues=issues.ordered(),
            end=end if end is not None and end.run_id == run.run_id else None,
        )


def load_run(directory: Path, *, watched: bool = False) -> RunData:
    """Read the newest run in a directory; `watched` shows how far it is, where that takes long."""
    journals = find_journals(directory)
    if not journals:
        raise JournalError(f"{str(directory)!r} has an empty journal: expected one that a run has begun. Try it later.")
    journal = max(journals, key=lambda found: (found.run.created, -found.rank))
    with Bar(f"Reading {directory.name}", total=journal.size(), unit="bytes") as bar:
        rows = journal.rows(bar.advance if watched else None)
        run = RunData.of(journal.run, directory, (record for _, record in rows))
    run.damaged = list(journal.damaged)
    run.is_running = is_being_written(journal.parts[-1])
    return run


class _Issues:
    """Follows the issues from row to row: each row that tells the health of its pair names all that are open."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], IssueHistory] = {}
        self._open: dict[str, set[str]] = {}

    def add(self, record: Record) -> None:
        if not record.issues and not any(name.startswith(_HEALTHY) for name in record.metrics):
            return
        now: set[str] = set()
        for issue in record.issues:
            kind, layer = str(issue.get("issue_type", "")), str(issue.get("layer", ""))
            key = f"{kind}:{layer}" if layer else kind
            now.add(key)
            self._see(record, key, issue)
        before = self._open.get(record.source, set())
        for key in before - now:
            history = self._found[record.source, key]
            history.spans[-1] = (history.spans[-1][0], record.step)
        self._open[record.source] = now

    def ordered(self) -> list[IssueHistory]:
        """Return the issues: those that are open first, causes before what they explain, then severity and time."""
        return sorted(
            self._found.values(),
            key=lambda issue: (issue.is_open, issue.is_cause, issue.severity, -issue.first_step),
            reverse=True,
        )

    def _see(self, record: Record, key: str, issue: Mapping[str, Any]) -> None:
        severity = _severity(issue.get("severity"))
        history = self._found.get((record.source, key))
        if history is None:
            history = IssueHistory(key=key, source=record.source, latest=issue, severity=severity)
            self._found[record.source, key] = history
        if key not in self._open.get(record.source, set()):
            history.spans.append((record.step, None))
        history.latest, history.severity = issue, max(history.severity, severity)


def _severity(name: object) -> IssueSeverity:
    try:
        return IssueSeverity(name)
    except ValueError:
        return IssueSeverity.MEDIUM
