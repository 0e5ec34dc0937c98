"""The tables and the sparklines of the terminal view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradtrack.pages.run_data import RunData, Track
from gradtrack.reports import StepReport
from gradtrack.reports.summary import has_finite

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_LOST, _INFINITE = "×", "∞"
WIDTH: Final = 28


def sparkline(
    values: NDArray[np.float64],
    *,
    log_scale: bool = False,
    width: int = WIDTH,
    scale: NDArray[np.float64] | None = None,
    lost: NDArray[np.bool_] | None = None,
) -> str:
    """Draw a line with block characters, each the highest value of its part, so that no spike is lost.

    The lowest and the highest block are the extremes of the line, or of the values in `scale`. A part that holds a
    value that is `lost`, as it was recorded and is not a number, is a cross; one without any value is like the last.
    """
    shown = _logs(values) if log_scale else values
    bounds = shown if scale is None else _logs(scale) if log_scale else scale
    bounds = bounds[np.isfinite(bounds)]
    if not np.isfinite(shown).any():
        return ""
    low, high = float(bounds.min()), float(bounds.max())
    steps = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    edges = np.linspace(0, len(shown), min(len(shown), width) + 1).astype(int)
    drawn = " "
    for start, end in pairwise(edges.tolist()):
        known = shown[start:end][~np.isnan(shown[start:end])]
        if lost is not None and lost[start:end].any():
            drawn += _LOST
        elif len(known):
            top = float(known.max())
            drawn += _INFINITE if top == math.inf else _BLOCKS[round((max(top, low) - low) * steps)]
        else:
            drawn += drawn[-1] if drawn[-1] != _LOST else " "
    return drawn[1:]


def _logs(values: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values)


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


def number(value: object) -> str:
    """Format a number with a few digits, a count with all of them; what is no number stays as it is."""
    if not isinstance(value, (int, float)):
        return "–" if value is None else str(value)
    is_whole = abs(value) < 1e6 and (abs(value) >= 1e4 or value == int(value))
    return f"{value:.0f}" if is_whole else f"{value:.4g}"


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
