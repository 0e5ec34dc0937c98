"""Reads the journals of a run from disk into columns, with its issues and how it ended."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradtrack.delivery.journal.reading import SavedRun, open_run
from gradtrack.delivery.journal.writing import is_being_written
from gradtrack.delivery.run_files import RUN_END, RunEnd
from gradtrack.errors import GradtrackError, JournalError
from gradtrack.pages.issues import Episode, IssueHistory, IssueLog
from gradtrack.records import Panel, Record, RunInfo, tail_of
from gradtrack.reports import HealthReport, Issue, IssueSeverity, StepReport
from gradtrack.support.names import plural
from gradtrack.support.progress import Bar

_GROUP_NORM: Final = "train/grad_norm/"
LOSS: Final = ""
"""The name of the column of losses; no metric has an empty one."""
_TIME: Final = "time"
_EPOCH: Final = "epoch"
_MOST_GAPS: Final = 40_000_000
"""The values that columns may lack: a name of ten bytes in the last row of many costs eight bytes in each."""
_COLUMN: Final = 40
"""The values that take as much as an empty column with its name."""
_OVER_FINITE: Final = re.compile(r"train/grad_(?:norm(?=/)|variance)(|/.*)$", re.DOTALL)


class Track:
    """The recorded steps of one (model, optimizer) pair as columns of numbers; a missing value is NaN.

    The columns and the metrics of its panels are called without the name of the pair. A step that was
    recorded twice, as some findings are known one step late and as a resumed run repeats steps, is one row with what
    came last.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._rows: dict[int, int] = {}
        self._time, self._epoch = array("d"), array("d")
        self._columns: dict[str, array[float]] = {}
        self._nan_steps: dict[str, set[int]] = {}
        self._panels: dict[Panel, None] = {}
        self._gaps = 0
        self.left_out: set[str] = set()
        """Metrics of which values are missing, since the gaps before them would fill the memory."""

    def add(self, record: Record) -> None:
        """Take in one row."""
        row = self._rows.setdefault(record.step, len(self._rows))
        self._set(self._time, row, record.time, record.step, _TIME)
        if record.epoch is not None:
            self._set(self._epoch, row, float(record.epoch), record.step, _EPOCH)
        if record.loss is not None:
            self._set(self._columns.setdefault(LOSS, array("d")), row, record.loss, record.step, LOSS)
        columns = self._columns
        for name, value in record.metrics.items():
            own = self._without_source(name) if self.name else name
            column = columns.get(own)
            if column is None:
                if self._gaps + row + _COLUMN > _MOST_GAPS:
                    if len(self.left_out) < _MOST_CAVEATS:
                        self.left_out.add(own)
                    continue
                self._gaps += _COLUMN
                column = columns[own] = array("d")
            if value == value and len(column) == row:
                column.append(value)  # the common case first: a long run has millions of values
            else:
                self._set(column, row, value, record.step, own)
        for panel in record.panels:
            own_metrics = tuple(map(self._without_source, panel.metrics)) if self.name else panel.metrics
            self._panels[replace(panel, metrics=own_metrics)] = None

    @property
    def steps(self) -> NDArray[np.int64]:
        """Return the step of every row, in order."""
        return np.array(sorted(self._rows), dtype=np.int64)

    @property
    def loss(self) -> NDArray[np.float64]:
        """Return the loss of every row."""
        return self.column(LOSS)

    @property
    def times(self) -> NDArray[np.float64]:
        """Return the time of every row, in seconds since 1970."""
        return self._in_order(self._time)

    @property
    def epochs(self) -> NDArray[np.float64]:
        """Return the epoch of every row."""
        return self._in_order(self._epoch)

    @property
    def names(self) -> list[str]:
        """Name the metrics, in the order in which they appeared."""
        return [name for name in self._columns if name != LOSS]

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
        return self._in_order(self._columns.get(name, ()))

    def _in_order(self, column: Sequence[float]) -> NDArray[np.float64]:
        values = np.full(len(self._rows), math.nan)
        values[: len(column)] = column
        return values[np.fromiter(self._rows, dtype=np.int64, count=len(self._rows)).argsort(kind="stable")]

    def over_finite(self, name: str) -> NDArray[np.float64]:
        """Return a metric as `column` does, but for a norm or a variance NaN where no gradient element was finite.

        Over no element at all both are 0, and the mean is not a number.
        """
        values, found = self.column(name), _OVER_FINITE.match(name)
        if found is None or f"train/grad_mean{found[1]}" not in self._columns:
            return values
        return np.where((values == 0.0) & np.isnan(self.column(f"train/grad_mean{found[1]}")), math.nan, values)

    def lost(self, name: str) -> NDArray[np.bool_]:
        """Return at which rows a metric was recorded, but is not a number or is over no finite element."""
        recorded = self.column(name)
        lost = np.isnan(self.over_finite(name)) & ~np.isnan(recorded)
        if name in self._nan_steps:
            lost |= np.isnan(recorded) & np.isin(self.steps, list(self._nan_steps[name]))
        return lost

    def last(self, name: str) -> float | None:
        """Return the last recorded value of a metric, NaN included; None if it was never recorded."""
        values = self.over_finite(name)
        rows = np.flatnonzero(~np.isnan(values) | self.lost(name))
        return float(values[rows[-1]]) if len(rows) else None

    def last_number(self, name: str) -> tuple[float, int | None]:
        """Return the last value that is a number, else NaN, and its step where a later row has none."""
        values = self.over_finite(name)
        known = np.flatnonzero(~np.isnan(values))
        if not len(known):
            return math.nan, None
        row = int(known[-1])
        return float(values[row]), None if row + 1 == len(values) else int(self.steps[row])

    def median(self, name: str) -> float | None:
        """Return the median of the finite values of a metric; None without any."""
        values = self.over_finite(name)
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else None

    def _set(self, column: array[float], row: int, value: float, step: int, name: str) -> None:
        if math.isnan(value):
            # In a column a NaN looks like a gap.
            self._nan_steps.setdefault(name, set()).add(step)
        if row == len(column):
            column.append(value)
            return
        if row > len(column):
            self._gaps += row - len(column)
            if self._gaps > _MOST_GAPS:
                self._gaps -= row - len(column)
                self.left_out.add(name)
                return
            column.extend([math.nan] * (row + 1 - len(column)))
        column[row] = value

    def _without_source(self, name: str) -> str:
        head, found, group = name.partition(f"/{self.name}/")
        return f"{head}/{group}" if found else name.removesuffix(f"/{self.name}")


_MOST_REPORTS: Final = 2000
_MOST_CAVEATS: Final = 50


def recorded_reports(run: str | Path, before: Mapping[str, int]) -> tuple[list[StepReport], dict[str, list[int]]]:
    """Return the recorded steps of each pair before one step as reports, and after which steps the run was resumed.

    Of more than 2,000 steps without a fault evenly spaced ones are returned. A run that cannot be read has none.
    """
    try:
        saved = open_run(run)
        rows = {(row.source, row.step): row for row in saved.rows() if row.step < before.get(row.source, 0)}
    except (GradtrackError, OSError):
        return [], {}
    usual = [key for key, row in rows.items() if not row.issues]
    kept = set(usual[:: 1 + len(usual) // _MOST_REPORTS])
    found = [_report_of(row) for key, row in rows.items() if row.issues or key in kept]
    return [report for report in found if report is not None], resumes_of([journal.run for journal in saved.journals])


def resumes_of(parts: Sequence[RunInfo]) -> dict[str, list[int]]:
    """Return the steps of each pair after which a run of these parts was resumed."""
    sources = dict.fromkeys(source for part in parts for source in part.resumed_at)
    return {
        source: sorted({part.resumed_at[source] for part in parts if source in part.resumed_at}) for source in sources
    }


def _report_of(row: Record) -> StepReport | None:
    """Return what a row tells of its step; None for one without a norm."""
    tail, metrics = tail_of(row.source), row.metrics

    def whole(name: str, group: str = "", lacking: float = math.nan) -> float:
        return metrics.get(f"train/grad_{name}{tail}{group}", lacking)

    def sums(group: str = "", faults: float = 0.0) -> dict[str, float]:
        found = {name: whole(name, group) for name in ("mean", "variance", "min", "max", "zero_fraction")}
        return {**found, "element_count": faults + (found["mean"] == found["mean"])}

    if f"train/grad_norm{tail}" not in metrics:
        return None
    prefix, faults = (
        f"train/grad_norm{tail}/",
        {f"{name}_count": whole(f"{name}_count", "", 0.0) for name in ("nan", "inf")},
    )
    clipping = {"enabled": f"train/grad_clip_rate{tail}" in metrics, "norm_before": whole("norm")}
    names = {
        "norm_after": "norm_clipped",
        "threshold": "clip_threshold",
        "coefficient": "clip_coef",
        "clip_rate": "clip_rate",
    }
    clipping |= {field: value for field, name in names.items() if (value := whole(name)) == value}
    statistics = {**sums("", sum(faults.values())), **faults, "std": whole("std"), "total_norm": whole("norm")}
    groups = [name.removeprefix(prefix) for name in metrics if name.startswith(prefix)]
    issues = []
    for issue in row.issues:
        with suppress(ValueError):  # of a type that this version does not know
            issues.append(Issue.model_validate(issue))
    return StepReport.model_validate(
        {
            **{name: getattr(row, name) for name in ("step", "epoch", "loss", "source", "time")},
            "skipped": whole("skipped") == 1.0,
            "health": HealthReport.of(issues),
            "clipping": clipping,
            "nan_inf": faults,
            "statistics": statistics if f"train/grad_variance{tail}" in metrics else None,
            "groups": {name: {**sums(f"/{name}"), "norm": whole("norm", f"/{name}")} for name in groups},
        }
    )


@dataclass(slots=True, kw_only=True)
class RunData:
    """One run: its identity, its rows as columns, its issues, and the summary from its end."""

    run: RunInfo
    directory: Path
    tracks: dict[str, Track]
    episodes: list[Episode]
    end: RunEnd | None = None
    is_running: bool = False
    damaged: list[str] = field(default_factory=list)
    caveats: list[str] = field(default_factory=list)
    """What the numbers of the run do not show, and why."""
    parts: Sequence[RunInfo] = ()
    """The trainings of which the run consists: each but the first was resumed from a checkpoint."""

    @property
    def resumed(self) -> dict[str, list[int]]:
        """Return the steps of each pair after which the training was resumed."""
        return resumes_of(self.parts)

    @property
    def resumed_text(self) -> str:
        """Return when the training was resumed, in words; empty where it was not."""
        told = [f"{', '.join(map(str, steps))}{source and f' of {source}'}" for source, steps in self.resumed.items()]
        return f"resumed after step {'; '.join(told)}" if told else ""

    @property
    def total_steps(self) -> int:
        """Return how many steps were taken, as far as is known."""
        if self.end is not None:
            return self.end.summary.total_steps
        return max((int(track.steps.max()) for track in self.tracks.values() if len(track.steps)), default=0)

    @property
    def state(self) -> str:
        """Return in a word or two whether the run goes on or how it ended."""
        if self.end is not None:
            return "interrupted" if self.end.interrupted else "failed" if self.end.failed else "ended"
        return "running" if self.is_running else "stopped without an end"

    @property
    def warning(self) -> str:
        """Return what happened to a run that did not end properly, and what to do; empty for any other."""
        if self.end is not None:
            if self.end.interrupted:
                return "The training was interrupted from the keyboard."
            return "The training raised an error." if self.end.failed else ""
        if self.is_running:
            return ""
        return (
            "The process ended without closing the run: what it recorded is here. "
            "gradtrack replay delivers what its trackers are missing."
        )

    @property
    def issues(self) -> list[IssueHistory]:
        """Return the issues, each cause before what followed from it."""
        return [issue for episode in self.episodes for issue in (episode.cause, *episode.effects)]

    @property
    def open_issues(self) -> list[IssueHistory]:
        """Return the issues that were open at the end."""
        return [issue for issue in self.issues if issue.is_open]

    @property
    def left_out(self) -> str:
        """Return a sentence on rows that cannot be read; empty without any."""
        return f"{plural(len(self.damaged), 'damaged row')} left out" if self.damaged else ""

    @property
    def healthy(self) -> bool:
        """Whether no issue of MEDIUM or above was open at the end."""
        return all(issue.severity < IssueSeverity.MEDIUM for issue in self.open_issues)

    def faults(self) -> dict[str, str]:
        """Return what is wrong with the run in words, by the values of `show --fail-on`; none for a healthy run."""
        critical = [issue.key for issue in self.issues if issue.severity >= IssueSeverity.CRITICAL]
        unhealthy = [issue.key for issue in self.open_issues if issue.severity >= IssueSeverity.MEDIUM]
        found = {
            "failed": self.warning.partition(":")[0].rstrip("."),
            "critical": f"It had a critical issue: {', '.join(critical)}" if critical else "",
            "open": f"It has an open issue: {', '.join(unhealthy)}" if unhealthy else "",
            "any": f"It had an issue: {', '.join(issue.key for issue in self.issues)}" if self.issues else "",
        }
        return {level: text for level, text in found.items() if text}

    @classmethod
    def of(cls, run: RunInfo, directory: Path, records: Iterable[Record], *, parts: Sequence[RunInfo] = ()) -> RunData:
        """Collect the rows of a run and the files that its end wrote; of several `parts` the run is the last."""
        tracks: dict[str, Track] = {}
        issues = IssueLog()
        caveats: dict[str, None] = {}
        for record in records:
            if len(caveats) < _MOST_CAVEATS:
                caveats.update((f"{record.source and f'{record.source}: '}{text}", None) for text in record.caveats)
            tracks.setdefault(record.source, Track(record.source)).add(record)
            issues.add(record)
        end = None
        try:
            end = RunEnd.load(directory / RUN_END)
        except JournalError as fault:  # the rows can be shown without it
            caveats = {f"How the run ended is left out: {fault}": None, **caveats}
        cut = sorted(name for track in tracks.values() for name in track.left_out)
        if cut:
            caveats = {f"metrics with long gaps are left out: {', '.join(cut[:3])}": None, **caveats}
        first = parts[0] if parts else run
        return cls(
            run=replace(run, run_id=first.run_id, created=first.created),
            parts=parts or (run,),
            directory=directory,
            tracks=tracks,
            episodes=issues.episodes(),
            caveats=list(caveats)[:_MOST_CAVEATS],
            end=end if end is not None and end.run_id == run.run_id else None,
        )


def load_run(run: str | Path, *, watched: bool = False) -> RunData:
    """Read the newest run of a directory, or the one that `RUN_DIR@2` or `RUN_DIR@RUN_ID` names.

    `watched` shows a progress bar if that takes long.
    """
    saved = open_run(run)
    with Bar(f"Reading {saved.directory.name}", total=saved.size(), unit="bytes") as bar:
        parts, rows = [journal.run for journal in saved.journals], saved.rows(bar.advance if watched else None)
        found = RunData.of(parts[-1], saved.directory, rows, parts=parts)
    found.damaged = [text for journal in saved.journals for text in journal.damaged]
    found.is_running = is_running(saved)
    return found


def is_running(run: SavedRun) -> bool:
    """Whether a run goes on, found without reading it."""
    return is_being_written(run.journals[-1].parts[-1])
