"""Two runs side by side: curves, numbers, groups, settings, and the issues that appeared or went."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

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

Pair = tuple[str, int | float | None, int | float | None]
"""A name with the number of the first run and of the second; None is unknown."""
_SHARE: Final = "clip rate"
_ONLY_ONE: Final = 1e-12


def in_words(rows: Sequence[Pair]) -> list[tuple[str, ...]]:
    """Format both numbers of each name as text."""
    return [(name, _in_digits(name, before), _in_digits(name, after)) for name, before, after in rows]


def _in_digits(name: str, value: int | float | None) -> str:
    if name.startswith(_SHARE) and value is not None:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else number(value)


def with_ratios(rows: Sequence[Pair]) -> list[tuple[str, ...]]:
    """Append the ratio of the second number to the first."""
    return [
        (*words, f"{ratio:.3g}" if math.isfinite(ratio := _ratio(pair)) else "–")
        for words, pair in zip(in_words(rows), rows, strict=True)
    ]


def _ratio(pair: Pair) -> float:
    _, before, after = pair
    return math.nan if not before or after is None else after / before


def most_changed(rows: Sequence[Pair], count: int) -> list[Pair]:
    """Return so many rows that differ most, in their order: what is no number in one run differs more than any.

    What only one run has does not differ, but is told before what is equal.
    """

    def change(index: int) -> float:
        if None in rows[index]:
            return _ONLY_ONE
        ratio, (before, after) = abs(_ratio(rows[index])), spell(list(rows[index][1:]))
        return abs(math.log(ratio)) if 0.0 < ratio < math.inf else 0.0 if before == after else math.inf

    return [rows[index] for index in sorted(sorted(range(len(rows)), key=change, reverse=True)[:count])]


Sides = Sequence[tuple[str, Track]]
"""The labels of the runs, each with its track of a pair that both have."""
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
    """Yield the loss, the curves of the whole model and the norms of the groups that both runs have."""
    first, second = (track for _, track in sides)
    shared = [group for group in first.groups if group in second.groups][:_GROUP_CHARTS]
    groups = [(f"Norm of {group}", f"train/grad_norm/{group}", True) for group in shared]
    for title, metric, log_scale in (("Loss", LOSS, None), *CURVES, *groups):
        yield _chart(sides, metric, log_scale, title=title, section=section, events=events)


def analyzer_curves(sides: Sides, source: str, events: Events) -> Iterator[Chart]:
    """Yield what analyzers say about the whole model in both runs, such as the gains, a chart for each metric."""
    first, second = (track for _, track in sides)
    found: Counter[str] = Counter()
    for metric in first.names:
        head, _, rest = metric.partition("/")
        if head == "train" or "/" in rest or metric not in second.names or found[head] == _ANALYZER_CHARTS:
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
    """Return a metric of both runs as one chart, by default on a log axis where its values span decades."""
    lines = [line_of(track, metric, name) for name, track in sides]
    if log_scale is None:
        log_scale = spans_decades(np.concatenate([line.values for line in lines]))
    return Chart(lines=lines, log_scale=log_scale, **settings)


_NORM: Final = "train/grad_norm"
_ROWS: Final = 40
_LESS: Final = ("gradient norm after clipping", "variance")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two runs; A is the first and B the second."""

    first: RunData
    second: RunData

    @property
    def appeared(self) -> list[IssueHistory]:
        """Return the issues that only the second run had."""
        return _only_in(self.second, self.first)

    @property
    def gone(self) -> list[IssueHistory]:
        """Return the issues that only the first run had."""
        return _only_in(self.first, self.second)

    @property
    def unmatched(self) -> str:
        """Say which (model, optimizer) pairs are in one run only, since pairs are compared by their name."""
        only = [
            (name, sorted(one.tracks.keys() - other.tracks.keys()))
            for name, one, other in (("A", self.first, self.second), ("B", self.second, self.first))
        ]
        told = [
            f"{', '.join(source or 'the unnamed pair' for source in found)} in {name}" for name, found in only if found
        ]
        return f"Not compared, as no pair of the other run has this name: {'; '.join(told)}." if told else ""

    def numbers(self) -> list[Pair]:
        """Return how each run ended, in numbers."""
        rows: list[Pair] = [("steps", self.first.total_steps, self.second.total_steps)]
        for source, first, second in self._tracks():
            tail = f" ({source})" if source else ""
            rows.append((f"last loss{tail}", first.last(LOSS), second.last(LOSS)))
            for title, metric, _ in CURVES:
                rows.append((f"{title.lower()}, median{tail}", first.median(metric), second.median(metric)))
        rows.append(("skipped steps", _skipped(self.first), _skipped(self.second)))
        return rows

    def sparklines(self, width: int = WIDTH) -> list[tuple[str, ...]]:
        """Return loss and gradient norm of both runs as lines of characters, each on a scale that both share."""
        rows: list[tuple[str, ...]] = []
        for source, first, second in self._tracks():
            for name, metric in (("loss", LOSS), ("gradient norm", _NORM)):
                both = [(track.column(metric), track.lost(metric)) for track in (first, second)]
                scale = np.concatenate([values for values, _ in both])
                log_scale = name != "loss" or spans_decades(scale)
                lines = (
                    sparkline(values, log_scale=log_scale, scale=scale, width=width, lost=lost) for values, lost in both
                )
                rows.append((f"{name} ({source})" if source else name, *lines))
        return [row for row in rows if any(row[1:])]

    def last_values(self) -> list[Pair]:
        """Return the last recorded norm of each group and value of each analyzer's metric; None is never recorded."""
        rows: list[Pair] = []
        for source, first, second in self._tracks():
            for name in dict.fromkeys([*first.names, *second.names]):
                if name.startswith("train/grad_norm/") or not name.startswith("train/"):
                    shown = name.removeprefix("train/grad_") + (f" ({source})" if source else "")
                    rows.append((shown, first.last(name), second.last(name)))
        return rows

    def settings(self) -> list[tuple[str, str, str]]:
        """Return the settings and versions in which the runs differ."""
        rows = []
        for first, second in (
            (self.first.run.config, self.second.run.config),
            (self.first.run.environment, self.second.run.environment),
        ):
            names = [name for name in dict.fromkeys([*first, *second]) if name != "run_dir"]
            rows += [(name, _said(first, name), _said(second, name)) for name in names]
        return [row for row in rows if row[1] != row[2]]

    def charts(self) -> list[Chart | HeatMap]:
        """Return each curve of both runs in one chart, and the groups of each over depth and time."""
        charts: list[Chart | HeatMap] = []
        for source, first, second in self._tracks():
            section = f"Curves: {source}" if source else "Curves"
            pair = [("A", first), ("B", second)]
            events = self._marks(source, "A", "B")
            charts += curves_of(pair, section, events)
            maps = []
            for name, track in pair:
                heat = heat_of(track, section=section, events=self._marks(source, name))
                if heat is not None:
                    maps.append(replace(heat, title=f"{name}: {heat.title[0].lower()}{heat.title[1:]}"))
            charts += on_one_scale(maps)
            charts += analyzer_curves(pair, source, events)
        return [chart for chart in charts if isinstance(chart, HeatMap) or chart.is_wanted]

    def _marks(self, source: str, *runs: str) -> list[tuple[int, str, int]]:
        """Return where issues opened that only one of the runs has, numbered as on the page."""
        events = events_of([(one, f"{one.cause.key} in {run[-1]}") for one, run in self._changes()], source)
        return [event for event in events if event[1].endswith(tuple(f" in {name}" for name in runs))]

    def _changes(self) -> list[tuple[Episode, str]]:
        """Return what appeared and what went as episodes, each with a remark that ends with the name of its run."""
        appeared, gone = episodes_of(self.appeared), episodes_of(self.gone)
        return [*((one, "appeared in B") for one in appeared), *((one, "gone from A") for one in gone)]

    def to_plain(self) -> dict[str, Any]:
        """Return the comparison as plain data for scripts."""
        return {
            "a": self.first.run.run_id,
            "b": self.second.run.run_id,
            "appeared": [issue.key for issue in self.appeared],
            "gone": [issue.key for issue in self.gone],
            "settings": {name: [a, b] for name, a, b in self.settings()},
            "numbers": {name: spell([a, b]) for name, a, b in self.numbers()},
            "last": {name: spell([a, b]) for name, a, b in self.last_values()},
        }

    def show(self) -> RenderableType:
        """Return the comparison as a rich renderable."""
        return SizedParts(self._parts)

    def _parts(self, width: int) -> list[RenderableType]:
        names = Text("\n".join(one_line(f"{name} {_identity(run)}") for name, run in self._runs()))
        parts: list[RenderableType] = [names]
        if self.unmatched:
            parts.append(Text(one_line(self.unmatched), style="yellow"))
        last = self.last_values()
        numbers, settings, most = self._tables(most_changed(last, _ROWS))
        lines = self.sparklines(max(8, min(WIDTH, (width - 20) // 2)))
        curves = Table(id="curves", title="Curves", columns=("", "A", "B"), rows=lines)
        for table in (numbers, curves, settings, most):
            if table.rows:
                rows = ((short(row[0]), *map(one_line, row[1:])) for row in table.rows)
                parts += ["", Text(table.title, style="bold"), rich_table(table.columns, rows, is_right=True)]
        if len(last) > _ROWS:
            parts.append(Text(f"and {len(last) - _ROWS} that changed less: see --html", style="dim"))
        for title, issues, style in (("Appeared", self.appeared, "red"), ("Gone", self.gone, "green")):
            parts += ["", Text(f"{title}: {plural(len(issues), 'issue') if issues else 'no issue'}", style="bold")]
            for issue in issues:
                parts.append(Text(f"  {issue.severity.value} {short(issue.key, 90)}  {issue.when}", style=style))
        return parts

    def write_html(self, path: Path) -> Path:
        """Write the comparison as one page."""
        tables = self._tables(self.last_values())
        main = [row for row in tables[0].rows if not row[0].startswith(_LESS)]
        names = self.first.directory.name, self.second.directory.name
        if names[0] == names[1] or not all(names):
            names = self.first.run.run_id, self.second.run.run_id
        page = fill(
            title=" and ".join(names),
            subtitle=" · ".join(f"{name} is {_identity(run)}" for name, run in self._runs()),
            healthy=not self.appeared,
            verdict=f"{len(self.appeared)} appeared, {len(self.gone)} gone",
            warning=self.unmatched,
            summary=[("", [(f"{name[0].upper()}{name[1:]}", f"{a} → {b}", "A → B") for name, a, b in main])],
            episodes=self._changes(),
            no_issues="No issue appeared or went.",
            tables=[table for table in tables if table.rows],
            details=[],
            charts=self.charts(),
        )
        write_atomically(path, page)
        return path

    def _tables(self, last: Sequence[Pair]) -> tuple[Table, Table, Table]:
        """Return the numbers of both runs, the settings that differ, and what was recorded last."""
        return (
            Table(id="numbers", title="Numbers", columns=("", "A", "B"), rows=in_words(self.numbers())),
            Table(id="settings", title="Settings that differ", columns=("setting", "A", "B"), rows=self.settings()),
            Table(
                id="last",
                title="Last recorded",
                columns=("metric", "A", "B", "B / A"),
                rows=with_ratios(last),
                search=True,
            ),
        )

    def _runs(self) -> tuple[tuple[str, RunData], tuple[str, RunData]]:
        return ("A", self.first), ("B", self.second)

    def _tracks(self) -> list[tuple[str, Track, Track]]:
        both = [source for source in self.first.tracks if source in self.second.tracks]
        return [(source, self.first.tracks[source], self.second.tracks[source]) for source in both]


def _only_in(run: RunData, other: RunData) -> list[IssueHistory]:
    known = {(issue.source, issue.key) for issue in other.issues}
    return [issue for issue in run.issues if (issue.source, issue.key) not in known]


def _identity(run: RunData) -> str:
    return f"{run.directory} ({run.run.run_id}, {run.state})"


def _skipped(run: RunData) -> int | None:
    return run.end.summary.nan_inf_summary.skipped_steps if run.end is not None else None


def _said(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], default=str) if name in values else "default"
