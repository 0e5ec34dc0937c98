"""What a W&B run is shown with when it ends: charts of the panels, its pictures and its report."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gradtrack.backends.base import RunParts
from gradtrack.backends.wandb.columns import chart_name
from gradtrack.backends.wandb.history import files_of, read_keys
from gradtrack.delivery.run_files import files_to_show
from gradtrack.records import Panel, Record
from gradtrack.support.redact import redact

_MOST_POINTS: Final = 1000
_MOST_ROWS: Final = 10_000


class Charts:
    """The curves of the panels with several lines; W&B itself draws every single metric.

    A curve keeps at most a thousand points, and of every four that are too many the lowest and the highest.
    """

    def __init__(self) -> None:
        self._panels: dict[Panel, None] = {}
        self._curves: dict[str, dict[int, float]] = {}
        self._wanted: dict[str, bool] = {}

    def take(self, records: Iterable[Record]) -> None:
        """Keep what the panels need; taking a record again changes nothing."""
        for record in records:
            if record.panels:
                found = (panel for panel in record.panels if panel.kind in ("multi-line", "band"))
                self._panels.update(dict.fromkeys(found))
                self._wanted.clear()
            for name, value in record.metrics.items():
                if self._is_wanted(name) and math.isfinite(value):
                    self._keep(name, record.step, value)

    def draw(self, package: Any) -> dict[str, Any]:
        """Return the charts by the names under which they are logged."""
        drawn = {}
        for panel in self._panels:
            lines = self._lines(panel)
            if len(lines) > 1:
                drawn[name_of(panel)] = package.plot.line_series(
                    xs=[list(points) for points in lines.values()],
                    ys=[list(points.values()) for points in lines.values()],
                    keys=list(lines),
                    title=f"{panel.title} (log10)" if panel.log_scale else panel.title,
                    xname="gradtrack/step",
                    split_table=True,
                )
        return drawn

    def _lines(self, panel: Panel) -> dict[str, Mapping[int, float]]:
        picked = [name for name in panel.pick(self._curves) if name in self._curves]
        limit = min(_MOST_POINTS, _MOST_ROWS // max(len(picked), 1))
        lines: dict[str, Mapping[int, float]] = {}
        for name in picked:
            points = self._curves[name]
            if panel.log_scale:
                points = {step: math.log10(value) for step, value in points.items() if value > 0}
            while len(points) > max(limit, 4):
                points = _halved(points)
            if points:
                lines[name] = dict(sorted(points.items()))
        return lines

    def _keep(self, name: str, step: int, value: float) -> None:
        curve = self._curves.setdefault(name, {})
        curve[step] = value
        if len(curve) > 2 * _MOST_POINTS:
            self._curves[name] = _halved(curve)

    def _is_wanted(self, name: str) -> bool:
        if name not in self._wanted:
            self._wanted[name] = any(name in panel.pick([name]) for panel in self._panels)
        return self._wanted[name]


def name_of(panel: Panel) -> str:
    """Return the name of a panel's chart, whose first part is its section of the page."""
    return chart_name(f"gradtrack {panel.section.replace(':', '')}/{panel.title}")


def _halved(points: Mapping[int, float]) -> dict[int, float]:
    """Keep the lowest and the highest of every four points."""
    steps = sorted(points)
    kept: dict[int, float] = {}
    for start in range(0, len(steps), 4):
        part = steps[start : start + 4]
        chosen = {min(part, key=points.__getitem__), max(part, key=points.__getitem__)}
        kept.update((step, points[step]) for step in part if step in chosen)
    return kept


class Show:
    """The last row of a W&B run: whatever there is to look at, once."""

    def __init__(self, package: Any, tell: Callable[[str], object]) -> None:
        self._wandb, self._tell = package, tell
        self._charts = Charts()
        self._parts = RunParts()
        self._wrote = False
        self._media: dict[str, Any] = {}
        self._copies: str | None = None

    def take(self, records: Sequence[Record], *, written: bool) -> None:
        """Learn of records, which this process has written, or which the run has from another one."""
        self._wrote = self._wrote or (written and bool(records))
        self._charts.take(records)
        self._parts.take(records)

    def gather(self) -> None:
        """Read the files of the run now, as they may be gone when the W&B run ends."""
        for path, content in files_to_show(self._parts.run, self._parts.files):
            with self._contained(path.name):
                if path.suffix == ".html":
                    page = content.decode("utf-8")
                    self._media[f"gradtrack/{path.stem}"] = self._wandb.Html(page, inject=False)
                elif path.suffix in (".png", ".jpg", ".jpeg", ".gif"):
                    self._media[f"gradtrack/{path.stem}"] = self._wandb.Image(self._copy(path.name, content))

    def put(self, run: Any, directory: str) -> None:
        """Log everything as one row, but for what the run was shown with before; nothing where we wrote no record."""
        if not self._wrote:
            return
        with self._contained("the last row"):
            row = {**self._charts.draw(self._wandb), **self._media}
            earlier = [path for path in files_of(run.id, directory) if path.parent != Path(run.dir).parent]
            there = read_keys(earlier) if row else set()
            row = {
                name: found for name, found in row.items() if not {name, f"Custom Chart Tables/{name}_table"} & there
            }
            if not row:
                return
            try:
                options = {"step": run.step + 1, "commit": True}  # no other row, which may be the user's, is joined
            except Exception:  # a shared run has no steps
                options = {}
            run.log(row, **options)

    def _copy(self, name: str, content: bytes) -> str:
        """Keep a picture where only this user can change it: W&B opens the path when the row is logged."""
        if self._copies is None:
            self._copies = tempfile.mkdtemp(prefix="gradtrack-")
            weakref.finalize(self, shutil.rmtree, self._copies, ignore_errors=True)
        copy = Path(self._copies, name)
        copy.write_bytes(content)
        return str(copy)

    @contextlib.contextmanager
    def _contained(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as fault:
            self._tell(f"{what} could not be shown ({type(fault).__name__}: {redact(str(fault))})")
