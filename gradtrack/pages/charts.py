"""Charts of a run as data: curves, event marks and bands, thinned out to the size of a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gradtrack import registry
from gradtrack.pages.heat_map import HeatMap, heat_of
from gradtrack.pages.issues import Episode
from gradtrack.pages.run_data import LOSS, RunData, Track
from gradtrack.records import Metric

_TOLD: Final = 4


def explain(lines: Sequence[tuple[str, str]]) -> str:
    """Return sentences on the lines of a chart, given as name and metric; empty for metrics without a description."""
    known = {meaning: name for name, metric in reversed(lines) if (meaning := meaning_of(metric))}
    told = [(name, meaning) for meaning, name in reversed(known.items())]
    if len(told) == 1:
        return told[0][1]
    return " ".join(f"{name}: {meaning}" for name, meaning in told) if len(told) <= _TOLD else ""


@cache
def meaning_of(metric: str) -> str:
    """Return the description of a metric of a built-in analyzer; empty for any other."""
    found = next((one for one in _described() if one.matches(metric)), None)
    if found is None:
        return ""
    return f"{found.meaning.removesuffix('.')} ({found.unit})." if found.unit else found.meaning


@cache
def _described() -> tuple[Metric, ...]:
    analyzers = [registry.analyzers.load(name) for name in registry.analyzers.builtin()]
    return tuple(metric for analyzer in analyzers for metric in analyzer.report_type.described)


@dataclass(frozen=True, slots=True)
class LineBuckets:
    """A line in buckets: the step in the middle of each, its median, and its smallest and largest value."""

    steps: NDArray[Any]
    median: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def thin_out(steps: NDArray[Any], values: NDArray[np.float64], *, buckets: int) -> LineBuckets:
    """Cut the finite values of a line into buckets of equal count; a short line stays as it is."""
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(values) <= buckets:
        return LineBuckets(steps, values, values, values)
    edges = np.linspace(0, len(values), buckets + 1).astype(int)
    parts = np.split(values, edges[1:-1])
    return LineBuckets(
        steps[(edges[:-1] + edges[1:]) // 2],
        np.array([2 * np.median(part / 2) for part in parts]),  # the sum of the middle two may be out of range
        np.array([part.min() for part in parts]),
        np.array([part.max() for part in parts]),
    )


_NUMBERS_PER_PAGE: Final = 60_000
_LINES_PER_CHART: Final = 24
_SHOWN_LINES: Final = 8
"""The lines of a chart that are drawn at first, the same number as in `line_chart.js`; the others on request."""
_CHARTS_PER_SECTION: Final = 12
_MARKS: Final = 200
_LOST: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve; `style` is solid, dashed or wide, and `lost` are the steps at which it is not a number."""

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    style: str = "solid"
    lost: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines that are drawn into one picture, and the section that it belongs to.

    An event is a step with a text and the number of its card, 0 where the training was resumed.
    """

    title: str
    lines: Sequence[Line]
    section: str = "Training"
    log_scale: bool = False
    about: str = ""
    events: Sequence[tuple[int, str, int]] = field(default_factory=tuple)
    always: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether the chart has a finite value to draw, or a note on why it has none."""
        return self.always or any(np.isfinite(line.values).any() for line in self.lines)

    def to_plain(self, *, buckets: int) -> dict[str, Any]:
        """Return the chart as plain data, each line with at most so many points; a line without data is left out."""
        lines = [_plain_line(line, buckets) for line in self.lines]
        return {
            "title": self.title,
            "section": self.section,
            "log": self.log_scale,
            "about": self.about,
            "events": [list(event) for event in self.events],
            "lines": [plain for plain in lines if plain["x"] or plain["bad"] or "lost" in plain] or lines[:1],
        }


def charts_of(run: RunData) -> list[Chart | HeatMap]:
    """Return every chart of a run that is not empty."""
    found = [chart for track in run.tracks.values() for chart in _charts(track, run)]
    return [chart for chart in found if isinstance(chart, HeatMap) or chart.is_wanted]


def to_plain(charts: Sequence[Chart | HeatMap]) -> list[dict[str, Any]]:
    """Return charts as plain data of bounded size: the more lines there are, the coarser each is."""
    lines = sum(len(chart.lines) for chart in charts if isinstance(chart, Chart))
    buckets = max(20, min(240, _NUMBERS_PER_PAGE // (4 * max(lines, 1))))
    return [chart.to_plain() if isinstance(chart, HeatMap) else chart.to_plain(buckets=buckets) for chart in charts]


def spans_decades(values: NDArray[np.float64]) -> bool:
    """Whether a line is positive and spans so many decades that it needs a log axis."""
    finite = values[np.isfinite(values)]
    return bool(len(finite)) and bool(finite.min() > 0) and bool(finite.max() > 20 * finite.min())


def events_of(episodes: Sequence[tuple[Episode, str]], source: str) -> list[tuple[int, str, int]]:
    """Return where the causes of a pair opened, in the order of the steps, each with the number of its episode.

    Each comes with what is told of it.
    """
    found = [
        (start, told, number)
        for number, (episode, told) in enumerate(episodes, 1)
        for start, _ in episode.cause.spans
        if episode.cause.source == source
    ]
    return sorted(found)[:_MARKS]


def _charts(track: Track, run: RunData) -> Iterator[Chart | HeatMap]:
    events = events_of([(one, one.cause.key) for one in run.episodes], track.name)
    events = sorted([*events, *((step, "resumed", 0) for step in run.resumed.get(track.name, ()))])
    section = f"Training: {track.name}" if track.name else "Training"

    line = partial(line_of, track)

    def chart(title: str, *lines: Line, **settings: Any) -> Chart:
        return Chart(title=title, lines=lines, section=section, events=events, **settings)

    loss = line(LOSS, "loss")
    is_recorded = bool(loss.lost) or bool(np.isinf(track.loss).any())
    yield chart("Loss", loss, log_scale=spans_decades(track.loss), always=is_recorded)
    yield chart(
        "Gradient norm",
        line("train/grad_norm", "before clipping", style="wide"),
        line("train/grad_norm_clipped", "after clipping"),
        line("train/grad_clip_threshold", "threshold", style="dashed"),
        log_scale=True,
        about="Global L2 norm, unscaled; × and ∞ mark what is NaN or infinite.",
        always="train/grad_norm" in track.names,
    )
    coefficient = line("train/grad_clip_coef", "coefficient")
    # A step that was left out is not clipped, whatever its gradients were.
    clipped = np.where(track.column("train/grad_skipped") == 1.0, math.nan, coefficient.values)
    yield chart(
        "Clipping",
        line("train/grad_clip_rate", "share of recent steps clipped"),
        replace(coefficient, values=clipped),
        about="A coefficient below 1 is how much a step was scaled down.",
    )
    bad = [line("train/grad_nan_count", "NaN"), line("train/grad_inf_count", "Inf")]
    if any(np.nansum(one.values) > 0 for one in bad):
        yield chart("Non-finite elements", *bad)
    yield chart("Variance", line("train/grad_variance", "variance"), log_scale=True)
    smallest = line("train/grad_min", "|min|")
    smallest = replace(smallest, values=np.abs(smallest.values))
    yield chart("Range", line("train/grad_max", "max"), smallest, log_scale=True)
    groups = _strongest(track, track.groups)
    lines = [line(f"train/grad_norm/{group}", group) for group in groups]
    left = len(track.groups) - _SHOWN_LINES
    about = f"The strongest {_SHOWN_LINES}; {left} more are below and in the table." if left > 0 else ""
    if len(track.groups) > 1:
        yield chart("Gradient norm of each group", *lines, log_scale=True, about=about)
    heat = heat_of(track, section=section, events=events)
    if heat is not None:
        yield heat
    yield from _analyzer_charts(track, events)


def _analyzer_charts(track: Track, events: Sequence[tuple[int, str, int]]) -> Iterator[Chart]:
    """Draw the panels that analyzers declared, then the metrics that none of them names."""
    rest = [name for name in track.names if not _is_own(name)]
    tail = f": {track.name}" if track.name else ""
    for panel in track.panels:
        if all(map(_is_own, panel.metrics)):
            continue
        names = [name for wanted in panel.metrics for name in _matching(wanted, track.names)]
        rest = [name for name in rest if name not in names]
        lines, about = _described_lines(track, names, panel.section.removesuffix(tail))
        yield Chart(
            title=panel.title,
            lines=lines,
            section=panel.section,
            log_scale=panel.log_scale,
            about=about,
            events=events,
        )
    for (section, stem), names in _by_stem(rest).items():
        lines, about = _described_lines(track, names, section)
        title = (stem if len(lines) > 1 else lines[0].name).replace("_", " ")
        title = f"{title[:1].upper()}{title[1:]}"
        yield Chart(title=title, lines=lines, section=f"{section}{tail}", about=about, events=events)


def _described_lines(track: Track, metrics: Sequence[str], section: str) -> tuple[list[Line], str]:
    """Return the lines of a chart, without what their names share, and sentences on them."""
    metrics = metrics[:_LINES_PER_CHART]
    names = [metric.removeprefix(f"{section}/") for metric in metrics]
    stem = f"{names[0].partition('/')[0]}/" if names else ""
    if len(names) > 1 and all(name.startswith(stem) for name in names):
        names = [name.removeprefix(stem) for name in names]
    lines = [line_of(track, metric, name) for metric, name in zip(metrics, names, strict=True)]
    return lines, explain(list(zip(names, metrics, strict=True)))


def _is_own(metric: str) -> bool:
    """Whether a metric is in the charts of the training itself."""
    return metric.startswith("train/")


def _matching(wanted: str, names: Sequence[str]) -> list[str]:
    if wanted.endswith("/*"):
        return [name for name in names if name.startswith(wanted[:-1])]
    return [name for name in names if name == wanted]


def _by_stem(names: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Group metrics that differ in their layer or group only, at most so many for each section."""
    stems: dict[tuple[str, str], list[str]] = {}
    for name in names:
        section, _, rest = name.partition("/")
        stems.setdefault((section, rest.partition("/")[0]), []).append(name)
    found: dict[str, int] = {}
    for section, stem in list(stems):
        found[section] = found.get(section, 0) + 1
        if found[section] > _CHARTS_PER_SECTION:
            del stems[section, stem]
    return stems


def _strongest(track: Track, groups: Sequence[str]) -> list[str]:
    """Return the groups of one chart, those that are shown at first before the others."""
    medians = {group: track.median(f"train/grad_norm/{group}") for group in groups}
    known = {group: -math.inf if median is None else median for group, median in medians.items()}
    kept = sorted(groups, key=known.__getitem__, reverse=True)[:_LINES_PER_CHART]
    shown = kept[:_SHOWN_LINES]
    return sorted(kept, key=lambda group: (group not in shown, groups.index(group)))


def line_of(track: Track, metric: str, name: str, *, style: str = "solid") -> Line:
    """Return a metric of a pair as a line, on which the loss and the norm are marked where they are not a number."""
    lost = track.steps[track.lost(metric)].tolist() if metric in (LOSS, "train/grad_norm") else ()
    return Line(name=name, steps=track.steps, values=track.over_finite(metric), style=style, lost=lost)


def _plain_line(line: Line, buckets: int) -> dict[str, Any]:
    # A part takes as much room as two values.
    count = len(line.steps) if len(line.steps) <= 2 * buckets else buckets
    thinned = thin_out(line.steps, line.values, buckets=count)
    infinite = line.steps[np.isinf(line.values)][:_MARKS]
    digits = _digits_of(thinned.high, thinned.low)
    plain = {
        "name": line.name,
        "style": line.style,
        "x": thinned.steps.tolist(),
        "y": _rounded(thinned.median, digits),
        "bad": infinite.tolist(),
    }
    if line.lost:
        plain["lost"] = _spread_out(line.lost)
    if thinned.low is thinned.high:  # every bucket holds one value
        return plain
    # The middle of the last bucket is not the last step.
    ends = [int(line.steps[0]), int(line.steps[-1])]
    return {**plain, "ends": ends, "low": _rounded(thinned.low, digits), "high": _rounded(thinned.high, digits)}


def _spread_out(steps: Sequence[int]) -> list[int]:
    """Thin out steps to the size of a chart, keeping the first and the last."""
    kept = np.linspace(0, len(steps) - 1, min(len(steps), _LOST)).astype(int)
    return [steps[index] for index in kept]


def _digits_of(high: NDArray[np.float64], low: NDArray[np.float64]) -> int:
    """Return how many digits distinguish the values of a line: the closer they are, the more."""
    if not len(high) or not (spread := float(high.max()) / 2 - float(low.min()) / 2):
        return 4
    largest = max(abs(float(high.max())), abs(float(low.min()))) / 2
    return 4 + min(max(math.floor(math.log10(largest / spread)), 0), 8)


def _rounded(values: NDArray[np.float64], digits: int) -> list[float]:
    rounded = [(value, float(f"{value:.{digits}g}")) for value in values.tolist()]
    return [found if math.isfinite(found) else value for value, found in rounded]
