"""The report of a run as one HTML file, with its tables."""

from __future__ import annotations

import errno
import json
import math
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np

from gradtrack._version import __version__
from gradtrack.delivery.run_files import noted_files, write_atomically
from gradtrack.pages.charts import Chart, charts_of, to_plain
from gradtrack.pages.heat_map import HeatMap
from gradtrack.pages.issues import ADVICE, Episode
from gradtrack.pages.paths import pictures_of_analyzers, way_to_open
from gradtrack.pages.run_data import LOSS, RunData, Track
from gradtrack.reports import IssueSeverity, StepReport
from gradtrack.reports.issues import doubt_about
from gradtrack.reports.summary import has_finite
from gradtrack.support.names import number, plural
from gradtrack.support.regular_files import read_regular

_BYTES: Final = 600_000


def embedded(paths: Iterable[Path]) -> list[tuple[str, str]]:
    """Return title and data of those files that are pictures without an equal chart, up to the limit of a page."""
    found, left = [], _BYTES
    shown = {picture.name for picture in pictures_of_analyzers() if not picture.is_charted}
    for path in paths:
        if path.suffix == ".png" and path.name.partition(".")[0] in shown:
            try:
                content = read_regular(path, most_bytes=left)
            except OSError as fault:
                if fault.errno == errno.EFBIG:
                    break
                continue
            left -= len(content)
            about = way_to_open(path.name).removeprefix("image: ")
            pair = path.name.removesuffix(".png").partition(".")[2]
            title = f"{about[:1].upper()}{about[1:]}{f' ({pair})' if pair else ''}"
            found.append((title, b64encode(content).decode()))
    return found


REPORT: Final = "report.html"
_ISSUES: Final = 200
_SHOWN_CARDS: Final = 3
_SCRIPTS: Final = ("parts.js", "heat_map.js", "line_chart.js", "page.js")
_HINT: Final = (
    "Drag across a chart to zoom in on steps; a double click shows all of them. With keys: the arrows read a chart, "
    "+ zooms in, and Escape shows all."
)


def write_html_report(run: RunData, path: Path | None = None, *, pictures: Sequence[Path] | None = None) -> Path:
    """Write the report of a run, into its directory where no other path is given, and return where it is.

    It holds those `pictures` that show what no chart does, by default of those that the run has left.
    """
    path = path if path is not None else run.directory / REPORT
    left = noted_files(run.directory, run.parts[-1].run_id) if pictures is None else pictures
    write_atomically(path, render(run, embedded(left)))
    return path


def render(run: RunData, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """Return the HTML page of a run."""
    created = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.run.created))
    return fill(
        title=f"Run {run.run.run_id}",
        subtitle=" · ".join(filter(None, (f"started {created}", run.state, run.resumed_text, run.left_out))),
        healthy=run.healthy,
        verdict=verdict(run),
        warning=run.warning,
        caveats=run.caveats,
        summary=_summary(run),
        episodes=[(episode, "") for episode in run.episodes[:_ISSUES]],
        no_issues="No issue opened in this run.",
        tables=[table for table in tables_of(run) if table.rows],
        details=[
            ("Configuration", _pairs(run.run.config) or [("everything", "as by default")]),
            ("Environment", _pairs(run.run.environment)),
        ],
        charts=charts_of(run),
        pictures=pictures,
    )


def fill(
    *, charts: Sequence[Chart | HeatMap], episodes: Sequence[tuple[Episode, str]], no_issues: str, **values: Any
) -> str:
    """Fill the page's template; every value is escaped, and no chart can leave its script element.

    Each episode comes with a remark, and has the number of its marks in the charts. The open ones after the first few,
    and those that are over, are folded, so that the charts are near the top.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("gradtrack.pages"), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    files = resources.files("gradtrack.pages").joinpath("templates")
    data = json.dumps(to_plain(charts), separators=(",", ":"), allow_nan=False)
    for sign, escaped in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        data = data.replace(sign, escaped)
    return environment.get_template("report.html.j2").render(
        version=__version__,
        style=Markup(files.joinpath("report.css").read_text(encoding="utf-8")),
        script=Markup("".join(files.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS)),
        data=Markup(data),
        cards=_folded(list(enumerate(episodes, 1)), no_issues),
        advice=ADVICE,
        evidence=_evidence,
        most_effects=_ISSUES,
        charts_hint=_HINT if charts else "",
        **{"pictures": (), "caveats": ()} | values,
    )


Cards = Sequence[tuple[int, tuple[Episode, str]]]


def _folded(cards: Cards, no_issues: str) -> list[tuple[str, Cards]]:
    """Return the cards that are shown, and those that are folded below a heading."""
    opened = [card for card in cards if card[1][0].is_open]
    closed = [card for card in cards if not card[1][0].is_open]
    rest = opened[_SHOWN_CARDS:]
    parts = [
        ("" if opened else no_issues if not cards else "No issue is open.", opened[:_SHOWN_CARDS]),
        (f"{len(rest)} more that {'are' if len(rest) > 1 else 'is'} open", rest),
        (f"{len(closed)} closed", closed),
    ]
    return [part for part in parts if part[1] or part is parts[0]]


def verdict(run: RunData) -> str:
    """Return the health of a run in two or three words."""
    count = sum(issue.severity >= IssueSeverity.MEDIUM for issue in run.open_issues)
    when = "" if run.end is not None or run.is_running else " when last seen"
    return f"healthy{when}" if run.healthy else plural(count, "open issue")


Tile = tuple[str, str, str]


def _summary(run: RunData) -> list[tuple[str, list[Tile]]]:
    """Return the numbers of the run, and those of each of several pairs under its name."""
    tracks = list(run.tracks.values())
    steps = ("Steps", f"{run.total_steps:,}", f"{sum(len(track.steps) for track in tracks):,} recorded")
    faults: list[Tile] = []
    if run.end is not None:
        found = run.end.summary
        faults.append(("Skipped", f"{found.nan_inf_summary.skipped_steps:,}", "steps with non-finite gradients"))
        faults.append(("Unhealthy", f"{found.health_issues.unhealthy_steps:,}", "steps"))
    if len(tracks) == 1 and not tracks[0].name:
        return [("", [steps, *_tiles(tracks[0]), *faults])]
    return [("", [steps, *faults]), *((track.name or "default", _tiles(track)) for track in tracks)]


def _tiles(track: Track) -> list[Tile]:
    tiles = []
    if track.last(LOSS) is not None:
        numbers = track.loss[~np.isnan(track.loss)]
        tiles.append(("Loss", *_ended(track, LOSS, f"from {number(numbers[0])}" if len(numbers) else "")))
    tiles.append(("Gradient norm", *_ended(track, "train/grad_norm", "before clipping")))
    rate = track.last("train/grad_clip_rate")
    if rate is not None:
        tiles.append(("Clipped", f"{rate:.1%}", "of the last steps"))
    return tiles


def _ended(track: Track, metric: str, about: str) -> tuple[str, str]:
    """Return the last value as text, and the note below it: for a NaN, the last number and its step."""
    last, (known, step) = track.last(metric), track.last_number(metric)
    if last is not None and math.isnan(last):
        return "NaN", f"{number(known)} at step {step}, no number since" if step is not None else "never a number"
    return number(known), about if step is None else f"{about}; of step {step}, not recorded since"


def _evidence(issue: Mapping[str, Any]) -> Iterator[str]:
    if issue.get("statistic"):
        yield f"{issue['statistic']} {number(issue.get('value'))}, limit {number(issue.get('threshold'))}"
    if issue.get("window", 1) != 1:
        yield f"over {issue['window']} steps"
    confidence = issue.get("confidence", 1.0)
    if confidence != 1.0:
        yield f"confidence {number(confidence)}"
    if isinstance(confidence, (int, float)) and (doubt := doubt_about(confidence, issue.get("explained_by"))):
        yield doubt


def _pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (str(name), value if isinstance(value, str) else json.dumps(value, default=str))
        for name, value in values.items()
    ]


_PARAMETERS: Final = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of the page; the first cell of a row is its name, and `words` are the columns that hold no numbers."""

    id: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    about: str = ""
    search: bool = False
    words: Sequence[int] = (0,)


def tables_of(run: RunData) -> list[Table]:
    """Return the tables of a run; some may have no row."""
    tables = []
    for index, track in enumerate(run.tracks.values()):
        tables.append(_group_table(f"groups{index}", track))
    for index, report in enumerate(run.end.last if run.end is not None else ()):
        tables.append(_parameter_table(f"parameters{index}", report))
    if run.end is not None and run.end.flight_recorder:
        tables.append(_flight_table(run.end.flight_recorder))
    return tables


def _group_table(identity: str, track: Track) -> Table:
    norms = {group: track.last_number(f"train/grad_norm/{group}") for group in track.groups}
    total = sum(norm * norm for norm, step in norms.values() if step is None and norm == norm)
    is_old = any(step is not None for _, step in norms.values())
    rows = []
    for group, (norm, step) in norms.items():
        others = (track.last_number(f"train/grad_{name}/{group}")[0] for name in ("mean", "variance"))
        share = f"{norm * norm / total:.4f}" if total and step is None and norm == norm else "–"
        age = [] if not is_old or norm != norm else [str(track.steps[-1] if step is None else step)]
        rows.append([group, _known(norm), share, *map(_known, others), *(age or ["–"] * is_old)])
    about = "As last recorded" if not is_old else "As recorded at the last step with a finite gradient"
    return Table(
        id=identity,
        title=f"Groups of {track.name}" if track.name else "Groups",
        columns=("group", "norm", "share", "mean", "variance", *(["step"] if is_old else [])),
        rows=rows,
        about=f"{about}. The share is that of the squared norm. A click on a column sorts by it.",
        search=len(track.groups) > 12,
    )


def _known(value: float) -> str:
    return number(None if value != value else value)


def _parameter_table(identity: str, report: StepReport) -> Table:
    columns = ("parameter", "group", "norm", "mean", "variance", "min", "max", "zeros", "elements", "non-finite")
    rows = [
        [
            name,
            found.group,
            *(_known(getattr(found, column) if has_finite(found) else math.nan) for column in columns[2:7]),
            f"{found.zero_fraction:.3f}",
            f"{found.element_count}",
            f"{found.nan_count + found.inf_count}",
        ]
        for name, found in list(report.parameters.items())[:_PARAMETERS]
    ]
    left = len(report.parameters) - len(rows)
    source = f" of {report.source}" if report.source else ""
    return Table(
        id=identity,
        title=f"Parameters{source} at step {report.step}",
        columns=columns,
        rows=rows,
        about=f"{left} more are in run_end.json." if left else "A click on a column sorts by it.",
        search=True,
        words=(0, 1),
    )


def _flight_table(reports: Sequence[StepReport]) -> Table:
    rows = []
    for report in reports:
        by_norm = {name: math.inf if one.norm != one.norm else one.norm for name, one in report.parameters.items()}
        worst = max(by_norm, key=by_norm.__getitem__, default="")
        counts = report.nan_inf.nan_count + report.nan_inf.inf_count
        batch = "" if report.batch is None else str(report.batch)
        norms = map(number, (report.loss, report.clipping.norm_before, report.clipping.norm_after))
        rows.append([f"step {report.step}", *norms, str(counts), worst, batch])
    return Table(
        id="flight",
        title="Flight recorder",
        columns=("step", "loss", "norm before", "norm after", "non-finite", "largest gradient", "batch"),
        rows=rows,
        about="The steps up to the first fault. Every parameter of each of them is in run_end.json.",
        words=(0, 5, 6),
    )
