"""Runs side by side: curves, numbers, groups, settings, and the issues that appeared or went."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from gradtrack.delivery.run_files import write_atomically
from gradtrack.pages.charts import Chart, events_of, line_of, meaning_of, spans_decades
from gradtrack.pages.heat_map import HeatMap, heat_of, on_one_scale
from gradtrack.pages.html import Table, fill
from gradtrack.pages.issues import Episode, IssueHistory, episodes_of
from gradtrack.pages.run_data import LOSS, RunData, Track
from gradtrack.pages.terminal.overview import WIDTH, SizedParts, rich_table, short, sparkline
from gradtrack.reports.step import spell
from gradtrack.support.names import number, one_line, plural

Row = tuple[str, *tuple[int | float | None, ...]]
"""A name with the number of each run; None is unknown."""
_SHARE: Final = "clip rate"
_ONLY_ONE: Final = 1e-12


def in_words(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Format the numbers of each name as text."""
    return [(name, *(_in_digits(name, value) for value in values)) for name, *values in rows]


def _in_digits(name: str, value: int | float | None) -> str:
    if name.startswith(_SHARE) and value is not None:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else number(value)


def with_ratios(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Append the ratio of the second number to the first."""
    return [
        (*words, f"{ratio:.3g}" if math.isfinite(ratio := _ratio(*numbers)) else "–")
        for words, (_, *numbers) in zip(in_words(rows), rows, strict=True)
    ]


def _ratio(before: int | float | None, after: int | float | None) -> float:
    return math.nan if not before or after is None else after / before


def most_changed(rows: Sequence[Row], count: int) -> list[Row]:
    """Return so many rows that differ most, in their order: what is no number in one run differs more than any.

    What only some runs have does not differ, but is told before what is equal.
    """

    def change(index: int) -> float:
        first, *others = values = rows[index][1:]
        if None in values:
            return _ONLY_ONE
        return max(_change(first, value) for value in others)

    return [rows[index] for index in sorted(sorted(range(len(rows)), key=change, reverse=True)[:count])]


def _change(before: int | float | None, after: int | float | None) -> float:
    ratio = abs(_ratio(before, after))
    return abs(math.log(ratio)) if 0.0 < ratio < math.inf else 0.0 if spell(before) == spell(after) else math.inf


Sides = Sequence[tuple[str, Track]]
"""The labels of the runs, each with its track of a pair that all have."""
Events = Sequence[tuple[int, str, int]]

CURVES: Final = (
    ("Gradient norm", "train/grad_norm", True),
    ("Gradient norm after clipping", "train/grad_norm_clipped", True),
    ("Clip rate", "train/grad_clip_rate", False),
    ("Variance", "train/grad_variance", True),
)
_GROUP_CHARTS: Final = 8
_ANALYZER_CHARTS: Final = 8


def curves_of(sides: Sides, section: str, events: Events) -> Iterator[Chart]:
    """Yield the loss, the curves of the whole model and the norms of the groups that all runs have."""
    first, *others = (track for _, track in sides)
    shared = [group for group in first.groups if all(group in other.groups for other in others)][:_GROUP_CHARTS]
    groups = [(f"Norm of {group}", f"train/grad_norm/{group}", True) for group in shared]
    for title, metric, log_scale in (("Loss", LOSS, None), *CURVES, *groups):
        yield _chart(sides, metric, log_scale, title=title, section=section, events=events)


def analyzer_curves(sides: Sides, source: str, events: Events) -> Iterator[Chart]:
    """Yield what analyzers say about the whole model in all runs, such as the gains, a chart for each metric."""
    first, *others = (track for _, track in sides)
    known = set(first.names).intersection(*(other.names for other in others))
    found: Counter[str] = Counter()
    for metric in first.names:
        head, _, rest = metric.partition("/")
        if head == "train" or "/" in rest or metric not in known or found[head] == _ANALYZER_CHARTS:
            continue
        found[head] += 1
        yield _chart(
            sides,
            metric,
            title=rest.replace("_", " ").capitalize(),
            section=f"{head}: {source}" if source else head,
            about=meaning_of(metric),
            events=events,
        )


def _chart(sides: Sides, metric: str, log_scale: bool | None = None, **settings: Any) -> Chart:
    """Return a metric of all runs as one chart, by default on a log axis where its values span decades."""
    lines = [line_of(track, metric, name) for name, track in sides]
    if log_scale is None:
        log_scale = spans_decades(np.concatenate([line.values for line in lines]))
    return Chart(lines=lines, log_scale=log_scale, **settings)


_NORM: Final = "train/grad_norm"
_ROWS: Final = 40
_LESS: Final = ("gradient norm after clipping", "variance")
_FEW: Final = 4


@final
class Comparison:
    """The comparison of runs, which are called A, B and so on, with the first of them."""

    def __init__(self, *runs: RunData) -> None:
        self.runs = {_letters(index): run for index, run in enumerate(runs)}
        self.first, *self.others = runs
        self._is_sweep = len(runs) > 2
        self._names = {name: run.directory.name or run.run.run_id for name, run in self.runs.items()}
        if len(set(self._names.values())) < len(runs):
            self._names = {name: run.run.run_id for name, run in self.runs.items()}

    @property
    def appeared(self) -> list[IssueHistory]:
        """Return the issues that the first run had not."""
        return [issue for run in self.others for issue in _only_in(run, self.first)]

    @property
    def gone(self) -> list[IssueHistory]:
        """Return the issues that only the first run had."""
        return _only_in(self.first, *self.others)

    @property
    def unmatched(self) -> str:
        """Say which (model, optimizer) pairs are not in every run, since pairs are compared by their name."""
        shared = {source for source, _ in self._tracks()}
        only = [(name, sorted(run.tracks.keys() - shared)) for name, run in self.runs.items()]
        told = [
            f"{', '.join(source or 'the unnamed pair' for source in found)} in {name}" for name, found in only if found
        ]
        why = "some run has no pair of this name" if self._is_sweep else "no pair of the other run has this name"
        return f"Not compared, as {why}: {'; '.join(told)}." if told else ""

    def numbers(self) -> list[Row]:
        """Return how each run ended, in numbers."""
        rows: list[Row] = [("steps", *(run.total_steps for run in self.runs.values()))]
        for source, tracks in self._tracks():
            tail = f" ({source})" if source else ""
            rows.append((f"last loss{tail}", *(track.last(LOSS) for track in tracks)))
            for title, metric, _ in CURVES:
                rows.append((f"{title.lower()}, median{tail}", *(track.median(metric) for track in tracks)))
        rows.append(("skipped steps", *map(_skipped, self.runs.values())))
        return rows

    def sparklines(self, width: int = WIDTH) -> list[tuple[str, ...]]:
        """Return loss and gradient norm of the runs as lines of characters, each on a scale that all share."""
        rows: list[tuple[str, ...]] = []
        for source, tracks in self._tracks():
            for name, metric in (("loss", LOSS), ("gradient norm", _NORM)):
                found = [(track.column(metric), track.lost(metric)) for track in tracks]
                scale = np.concatenate([values for values, _ in found])
                log_scale = name != "loss" or spans_decades(scale)
                lines = (
                    sparkline(values, log_scale=log_scale, scale=scale, width=width, lost=lost)
                    for values, lost in found
                )
                rows.append((f"{name} ({source})" if source else name, *lines))
        return [row for row in rows if any(row[1:])]

    def last_values(self) -> list[Row]:
        """Return the last recorded norm of each group and value of each analyzer's metric; None is never recorded."""
        rows: list[Row] = []
        for source, tracks in self._tracks():
            for name in dict.fromkeys(name for track in tracks for name in track.names):
                if name.startswith("train/grad_norm/") or not name.startswith("train/"):
                    shown = name.removeprefix("train/grad_") + (f" ({source})" if source else "")
                    rows.append((shown, *(track.last(name) for track in tracks)))
        return rows

    def settings(self) -> list[tuple[str, ...]]:
        """Return the settings and versions in which the runs differ."""
        rows: list[tuple[str, ...]] = []
        runs = [run.run for run in self.runs.values()]
        for found in ([run.config for run in runs], [run.environment for run in runs]):
            names = [name for name in dict.fromkeys(name for one in found for name in one) if name != "run_dir"]
            rows += [(name, *(_said(one, name) for one in found)) for name in names]
        return [row for row in rows if len(set(row[1:])) > 1]

    def charts(self) -> list[Chart | HeatMap]:
        """Return each curve of all runs in one chart, and of two runs the groups of each over depth and time."""
        charts: list[Chart | HeatMap] = []
        for source, tracks in self._tracks():
            section = f"Curves: {source}" if source else "Curves"
            labels = [f"{name}: {told}" if self._is_sweep else name for name, told in self._names.items()]
            sides = list(zip(labels, tracks, strict=True))
            events = self._marks(source, *self.runs)
            charts += curves_of(sides, section, events)
            maps = []
            for name, track in [] if self._is_sweep else sides:
                heat = heat_of(track, section=section, events=self._marks(source, name))
                if heat is not None:
                    maps.append(replace(heat, title=f"{name}: {heat.title[0].lower()}{heat.title[1:]}"))
            charts += on_one_scale(maps)
            charts += analyzer_curves(sides, source, events)
        return [chart for chart in charts if isinstance(chart, HeatMap) or chart.is_wanted]

    def _marks(self, source: str, *runs: str) -> list[tuple[int, str, int]]:
        """Return where issues opened that only some of the runs have, numbered as on the page."""
        changes = [(one, f"{one.cause.key} in {remark.rpartition(' ')[2]}") for one, remark in self._changes()]
        return [event for event in events_of(changes, source) if event[1].rpartition(" ")[2] in runs]

    def _changes(self) -> list[tuple[Episode, str]]:
        """Return what appeared and what went as episodes, each with a remark that ends with the name of its run."""
        first, *others = self.runs
        appeared = [
            (one, f"appeared in {name}")
            for name in others
            for one in episodes_of(_only_in(self.runs[name], self.first))
        ]
        return [*appeared, *((one, f"gone from {first}") for one in episodes_of(self.gone))]

    def to_plain(self) -> dict[str, Any]:
        """Return the comparison as plain data for scripts."""
        ids = [run.run.run_id for run in self.runs.values()]
        return {
            **({} if self._is_sweep else dict(zip("ab", ids, strict=True))),
            "runs": ids,
            "appeared": list(dict.fromkeys(issue.key for issue in self.appeared)),
            "gone": [issue.key for issue in self.gone],
            "settings": {name: found for name, *found in self.settings()},
            "numbers": {name: [spell(value) for value in found] for name, *found in self.numbers()},
            "last": {name: [spell(value) for value in found] for name, *found in self.last_values()},
        }

    def show(self) -> RenderableType:
        """Return the comparison as a rich renderable."""
        return SizedParts(self._parts)

    def _parts(self, width: int) -> list[RenderableType]:
        names = Text("\n".join(one_line(f"{name} {_identity(run)}") for name, run in self.runs.items()))
        parts: list[RenderableType] = [names]
        if self.unmatched:
            parts.append(Text(one_line(self.unmatched), style="yellow"))
        last = self.last_values() if len(self.runs) <= _FEW else []
        numbers, settings, most = self._tables(most_changed(last, _ROWS))
        lines = self.sparklines(max(8, min(WIDTH, (width - 20) // 2)))
        curves = self._table("curves", "Curves", "", lines)
        for table in (numbers, curves, settings, most):
            if table.rows:
                rows = ((short(row[0]), *map(one_line, row[1:])) for row in table.rows)
                parts += ["", Text(table.title, style="bold"), rich_table(table.columns, rows, is_right=True)]
        if len(last) > _ROWS:
            parts.append(Text(f"and {len(last) - _ROWS} that changed less: see --html", style="dim"))
        first, *others = self.runs
        appeared = [(name, issue) for name in others for issue in _only_in(self.runs[name], self.first)]
        gone = [(first, issue) for issue in self.gone]
        for title, found, style in (("Appeared", appeared, "red"), ("Gone", gone, "green")):
            parts += ["", Text(f"{title}: {plural(len(found), 'issue') if found else 'no issue'}", style="bold")]
            for name, issue in found:
                where = f"{name}  " if self._is_sweep else ""
                parts.append(Text(f"  {where}{issue.severity.value} {short(issue.key, 90)}  {issue.when}", style=style))
        return parts

    def write_html(self, path: Path) -> Path:
        """Write the comparison as one page."""
        tables = self._tables(self.last_values())
        main = [row for row in self.numbers() if not row[0].startswith(_LESS)]
        names = list(self._names.values())
        page = fill(
            title=" and ".join(names) if len(names) <= _FEW else f"{len(names)} runs",
            subtitle=" · ".join(f"{name} is {_identity(run)}" for name, run in self.runs.items()),
            healthy=not self.appeared,
            verdict=f"{len(self.appeared)} appeared, {len(self.gone)} gone",
            warning=self.unmatched,
            summary=[("", [(f"{row[0][0].upper()}{row[0][1:]}", *self._tile(row)) for row in main])],
            episodes=self._changes(),
            no_issues="No issue appeared or went.",
            tables=[table for table in tables if table.rows],
            details=[],
            charts=self.charts(),
        )
        write_atomically(path, page)
        return path

    def _tile(self, row: Row) -> tuple[str, str]:
        """Return the numbers of two runs, or the range of those of more, and what they are."""
        if not self._is_sweep:
            return " → ".join(in_words([row])[0][1:]), "A → B"
        known = [value for value in row[1:] if value is not None and value == value]
        words = in_words([(row[0], min(known), max(known))])[0][1:] if known else ("–",)
        return " to ".join(dict.fromkeys(words)), f"of {len(known)} runs"

    def _tables(self, last: Sequence[Row]) -> tuple[Table, Table, Table]:
        """Return the numbers of the runs, the settings that differ, and what was recorded last."""
        ratios = () if self._is_sweep else ("B / A",)
        return (
            self._table("numbers", "Numbers", "", in_words(self.numbers())),
            self._table("settings", "Settings that differ", "setting", self.settings()),
            Table(
                id="last",
                title="Last recorded",
                columns=("metric", *self.runs, *ratios),
                rows=in_words(last) if self._is_sweep else with_ratios(last),
                search=True,
            ),
        )

    def _table(self, identity: str, title: str, head: str, rows: Sequence[tuple[str, ...]]) -> Table:
        """Return a table with a column for each of two runs, or a line for each of more."""
        columns: tuple[str, ...] = (head, *self.runs)
        if self._is_sweep and rows:
            columns, *rows = zip(columns, *rows, strict=True)
            columns = ("run", *columns[1:])
        return Table(id=identity, title=title, columns=columns, rows=rows)

    def _tracks(self) -> list[tuple[str, list[Track]]]:
        shared = [source for source in self.first.tracks if all(source in run.tracks for run in self.others)]
        return [(source, [run.tracks[source] for run in self.runs.values()]) for source in shared]


def _letters(index: int) -> str:
    """Return the name of a run: A to Z, then AA and so on."""
    return (_letters(index // 26 - 1) if index >= 26 else "") + chr(ord("A") + index % 26)


def _only_in(run: RunData, *others: RunData) -> list[IssueHistory]:
    known = {(issue.source, issue.key) for other in others for issue in other.issues}
    return [issue for issue in run.issues if (issue.source, issue.key) not in known]


def _identity(run: RunData) -> str:
    return f"{run.directory} ({run.run.run_id}, {run.state})"


def _skipped(run: RunData) -> int | None:
    return run.end.summary.nan_inf_summary.skipped_steps if run.end is not None else None


def _said(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], default=str) if name in values else "default"
