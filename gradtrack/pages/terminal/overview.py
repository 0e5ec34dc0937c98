"""Renders a run, with sparklines, and the answer of `gradtrack doctor` for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradtrack.delivery.preflight import Diagnosis
from gradtrack.functional.verdict import visualize_layer_gradients
from gradtrack.pages.charts import spans_decades
from gradtrack.pages.issues import ADVICE, IssueHistory
from gradtrack.pages.paths import listing
from gradtrack.pages.run_data import LOSS, RunData, Track
from gradtrack.reports import IssueSeverity
from gradtrack.support.names import number, one_line, plural

_STATE_COLOURS: Final = {"ready": "green", "not configured": "dim", "not installed": "dim"}


def show_diagnosis(found: Diagnosis) -> RenderableType:
    """Return versions, the run directory, every backend and the configured plugins as a rich renderable."""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    where = found.run_dir_fault or found.run_dir or "a new directory in gradtrack_runs, where a backend needs one"
    head = Text(f"{versions}, rank {found.rank}\nrun directory: {where}\n")
    rows = [
        (one.name, "yes" if one.configured else "", _state(one.state, one.configured), one.destination or one.reason)
        for one in found.backends
    ]
    parts = [head, rich_table(("backend", "configured", "state", "where to, or why not"), rows)]
    kinds = (("analyzer", found.analyzers, "why not"), ("alert", found.alerts, "what it posts, or why not"))
    for kind, named, about in kinds:
        told = [(one.name, _state(one.state), one.destination or one.reason) for one in named]
        parts += [Text(), rich_table((kind, "state", about), told)] if told else []
    return Group(*parts)


def _state(state: str, configured: bool = True) -> Text:
    return Text(state, _STATE_COLOURS.get(state, "red" if configured else "yellow"))


def rich_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, is_right: bool = False
) -> RenderableType:
    """Return a table for a terminal, whose first column stays on one line unless numbers follow to the right of it."""
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        justify: JustifyMethod = "right" if is_right and index else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=not (index or is_right))
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


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


_GROUPS: Final = 24
_ISSUES: Final = 20
_ANALYZER_CURVES: Final = 12
_NAME: Final = 45
_CELLS: Final = 12
_BAR: Final = 34
_COLOURS: Final = {
    IssueSeverity.CRITICAL: "bold red",
    IssueSeverity.HIGH: "red",
    IssueSeverity.MEDIUM: "yellow",
    IssueSeverity.LOW: "cyan",
    IssueSeverity.INFO: "dim",
}
_CURVES: Final = (
    ("gradient norm", "train/grad_norm", True),
    ("after clipping", "train/grad_norm_clipped", True),
    ("variance", "train/grad_variance", True),
    ("clip rate", "train/grad_clip_rate", False),
)


def show(run: RunData, *, live: bool = False) -> RenderableType:
    """Return a run as a rich renderable; of a live one issues come early, as the terminal may cut off the bottom."""
    above: list[RenderableType] = []
    below: list[RenderableType] = []
    for track in run.tracks.values():
        of_analyzers = () if live else analyzer_curves(track)
        above += ["", SizedParts(partial(_curves, track, run.resumed.get(track.name, ()), of_analyzers))]
        (below if live else above).append(SizedParts(partial(_groups, track)))
    if not live:
        below += _files(run)
    return Group(_head(run), *above, "", *_issues(run), *below)


def _head(run: RunData) -> RenderableType:
    text = Text.assemble(
        (f"Run {one_line(run.run.run_id)}", "bold"), f"  {run.state}, {plural(run.total_steps, 'step')}  "
    )
    told = f" ({plural(len(run.open_issues), 'open issue')})" if run.open_issues else ""
    text.append(f"{'healthy' if run.healthy else 'unhealthy'}{told}", style="green" if run.healthy else "bold red")
    if run.end is not None and run.end.summary.nan_inf_summary.skipped_steps:
        text.append(f"  {run.end.summary.nan_inf_summary.skipped_steps} skipped")
    if run.resumed:
        text.append(f"  {one_line(run.resumed_text)}")
    if run.damaged:
        text.append(f"  {run.left_out}", style="yellow")
    if run.warning:
        text.append(f"\n{run.warning}", style="yellow")
    for caveat in run.caveats:
        text.append(f"\nnote: {one_line(caveat)}", style="yellow")
    return text


class SizedParts:
    """A renderable that is built for the width of the terminal, so that no number is cut off."""

    def __init__(self, build: Callable[[int], Iterable[RenderableType]]) -> None:
        self._build = build

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from self._build(options.max_width)


def analyzer_curves(track: Track) -> list[tuple[str, str, bool]]:
    """Return the first curves of the panels that analyzers declared: name, metric, and whether to draw logarithms.

    Each panel gives one curve before any gives a second one.
    """
    panels = [one for one in track.panels if one.metrics and not one.metrics[0].startswith("train/")]
    names = frozenset(track.names)
    found = [(at, metric, panel) for panel in panels for at, metric in enumerate(panel.metrics) if metric in names]
    chosen = {metric for _, metric, _ in sorted(found, key=lambda curve: curve[0])[:_ANALYZER_CURVES]}
    return [(metric, metric, panel.log_scale) for _, metric, panel in found if metric in chosen]


def _curves(
    track: Track, resumed: Sequence[int], of_analyzers: Sequence[tuple[str, str, bool]], width: int
) -> Iterator[RenderableType]:
    curves = (("loss", LOSS, spans_decades(track.loss)), *_CURVES, *of_analyzers)
    rows = [(name, key, log_scale, _numbers_of(track, key)) for name, key, log_scale in curves]
    heads, left = _room([(name, *words) for name, *_, words in rows if words], width)
    table = Table(
        box=None, pad_edge=False, title=Text(one_line(track.name)) if track.name else None, title_justify="left"
    )
    for column in ("", "", *heads):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for name, key, log_scale, words in rows:
        if words:
            shown, letters = track.over_finite(key), max(1, min(left, 2 * WIDTH))
            drawn = sparkline(shown, log_scale=log_scale, width=letters, lost=track.lost(key))
            table.add_row(name, drawn, *words[: len(heads)])
        elif (name == "gradient norm" and len(track.steps)) or (name == "loss" and track.last(LOSS) is not None):
            table.add_row(name, "never finite", *("–" for _ in heads), style="red")
    if resumed and len(track.steps):
        letters = min(len(track.steps), max(1, min(left, 2 * WIDTH)))
        places = {int(np.searchsorted(track.steps, step, "right")) * letters // len(track.steps) for step in resumed}
        table.add_row("resumed", "".join("│" if at in places else " " for at in range(letters)), style="dim")
    yield table


def _room(cells: Sequence[Sequence[str]], width: int) -> tuple[tuple[str, ...], int]:
    """Return the columns that fit and the width left for a sparkline; in a narrow terminal only the last number."""
    for heads in (("last", "lowest", "highest"), ("last",)):
        columns = zip(*[("", *heads), *(cell[: len(heads) + 1] for cell in cells)], strict=True)
        left = width - sum(max(map(len, column)) + 2 for column in columns)
        if left > 0:
            break
    return heads, left


def _numbers_of(track: Track, key: str) -> tuple[str, ...]:
    values = track.over_finite(key)
    finite = values[np.isfinite(values)]
    if not len(finite):
        return ()
    last, (known, step) = track.last(key), track.last_number(key)
    ended = f"NaN ({number(known)} at step {step})" if last is not None and last != last else number(known) + _age(step)
    return ended, number(finite.min()), number(finite.max())


def _age(step: int | None) -> str:
    """Return the step of a number that is older than the last row, as text."""
    return "" if step is None else f" (step {step})"


def _groups(track: Track, total: int) -> Iterator[RenderableType]:
    norms = {group: track.last_number(f"train/grad_norm/{group}") for group in track.groups}
    known = {group: norm for group, (norm, _) in norms.items() if not math.isnan(norm)}
    if not known:
        return
    layers = visualize_layer_gradients(known).layers[::-1]
    # In a deep network the first and the last groups matter most.
    shown = np.unique(np.linspace(0, len(layers) - 1, min(len(layers), _GROUPS)).astype(int))
    layers = tuple(layers[place] for place in shown)
    prefix = common_prefix(known)
    letters = max(12, min(_NAME, total - _BAR))
    width = max(cell_len(short(layer.name.removeprefix(prefix), letters)) for layer in layers)
    within = f", within {one_line(prefix.removesuffix('.'))}" if prefix else ""
    yield Text(f"\nGradient norm of each group at step {int(track.steps[-1])}{within}", style="bold")
    largest = max((norm for norm in known.values() if norm < math.inf), default=0.0)
    for layer in layers:
        name = short(layer.name.removeprefix(prefix), letters)
        space = " " * (width - cell_len(name) + 2)
        age = _age(norms[layer.name][1])
        yield Text(f"{name}{space}|{'█' * _bar_cells(layer.norm, largest):<{_CELLS}}| norm: {number(layer.norm)}{age}")
    if len(known) > _GROUPS:
        yield Text(f"and {len(known) - _GROUPS} more between them: see gradtrack report", style="dim")


def common_prefix(names: Iterable[str]) -> str:
    """Return the modules that all names begin with, with the dot behind them; of a single name, nothing."""
    parts = [name.split(".")[:-1] for name in names]
    if len(parts) < 2:
        return ""
    shared = [column[0] for column in itertools.takewhile(lambda one: len(set(one)) == 1, zip(*parts, strict=False))]
    return "".join(f"{part}." for part in shared)


def _bar_cells(norm: float, largest: float) -> int:
    """Return the length of a bar that is proportional to its norm; one cell stands for any that is not zero."""
    if not norm > 0.0:
        return 0
    return _CELLS if norm >= largest else max(1, round(_CELLS * norm / largest))


def _issues(run: RunData) -> Iterator[RenderableType]:
    if not run.episodes:
        yield Text("No issue opened.", style="green")
        return
    yield Text("Issues", style="bold")
    for episode in run.episodes[:_ISSUES]:
        cause = episode.cause
        yield _issue_head(cause)
        lines = [cause.text("message")] if episode.is_open else []
        if cause.cause:
            lines.append(f"Root cause: {cause.cause}")
        if episode.is_open and (advice := cause.text("recommendation")):
            lines.append(f"{ADVICE[bool(cause.cause)]}: {advice}")
        if episode.effects:
            lines.append(f"Followed by {episode.followed}")
        if lines:
            yield Padding(Text("\n".join(map(one_line, lines))), (0, 0, 0, 4), expand=False)
    if len(run.episodes) > _ISSUES:
        yield Text(f"and {len(run.episodes) - _ISSUES} more", style="dim")


def _issue_head(issue: IssueHistory) -> RenderableType:
    whose = f" of {one_line(issue.source)}" if issue.source else ""
    head = Text.assemble((issue.severity.value, _COLOURS[issue.severity]), f" {one_line(issue.place)}{whose}")
    head.append(f"  {issue.when}" + ("" if issue.is_open else ", closed"), style="dim")
    return head


def _files(run: RunData) -> Iterator[RenderableType]:
    found = listing(run.directory)
    if found:
        yield Text(f"\nFiles in {run.directory}", style="bold")
        # A command that wraps onto two lines cannot be copied.
        yield from (Text(line, no_wrap=True, overflow="ignore") for line in found)


def short(name: str, letters: int = _NAME) -> str:
    """Cut the middle out of a name that is too long for its column."""
    line = one_line(name)
    return line if len(line) <= letters else f"{line[: letters // 3]}…{line[1 - letters + letters // 3 :]}"
