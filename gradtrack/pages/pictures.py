"""Draws the pictures of a training: curves, statistics, gradient flow, and those of the analyzers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from gradtrack import registry
from gradtrack.drawing import figures
from gradtrack.drawing.figures import BLUE, CYCLE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, panel, plain
from gradtrack.pages.charts import spans_decades
from gradtrack.pages.gradient_flow import draw_gradient_flow, flow_of
from gradtrack.reports import GradientStatistics, StepReport
from gradtrack.reports.summary import has_finite
from gradtrack.support.names import file_part, plural

_STATISTICS: Final = ("total_norm", "mean", "std", "min", "max", "zero_fraction")
_EMPTY: Final = "No steps were recorded."
Drawer = Callable[[Path], Path]
Resumed = Mapping[str, Sequence[int]]
NEVER: Final[Resumed] = {}


def pictures_of(
    reports: Sequence[StepReport], statistics: Sequence[GradientStatistics], *, resumed: Resumed = NEVER
) -> dict[str, Drawer]:
    """Return a drawing function for each picture by file name; with several pairs some pictures exist for each pair.

    `resumed` are the steps of each pair after which the training was resumed.
    """
    found: dict[str, Drawer] = {
        "training_curves.png": lambda path: figures.save(draw_training_curves(reports, resumed=resumed), path)
    }
    pairs = by_source(reports)
    for source, own in pairs.items():
        known = statistics if len(pairs) == 1 else [one.statistics for one in own if one.statistics is not None]
        tail = f".{file_part(source)}" if source and len(pairs) > 1 else ""
        pictures = _pictures_of_pair(own, known, resumed, source if tail else "")
        found |= {f"{name}{tail}.png": draw for name, draw in pictures.items()}
    return found


def _pictures_of_pair(
    reports: Sequence[StepReport], statistics: Sequence[GradientStatistics], resumed: Resumed, title: str
) -> dict[str, Drawer]:
    over_time = statistics_over_time(reports)
    events = _marks(reports, resumed)
    lost = [one.step for one in reports if one.statistics is not None and not has_finite(one.statistics)]
    steps, norms, issues = flow_of(reports)
    pictures: dict[str, Drawer] = {
        "gradient_statistics": lambda path: figures.save(
            draw_gradient_statistics_over_time(over_time, events=events, lost=lost, name=title), path
        ),
        "gradient_stats": lambda path: figures.save(draw_gradient_statistics(statistics, name=title), path),
        "gradient_flow": lambda path: figures.save(
            draw_gradient_flow(norms, steps=steps, issues=issues, name=title), path
        ),
    }
    for name in dict.fromkeys(name for report in reports for name in report.analyzers):
        if name in registry.analyzers.names():
            pictures |= registry.analyzers.load(name).pictures(reports)
    return pictures


def _marks(reports: Sequence[StepReport], resumed: Resumed) -> list[tuple[float, str]]:
    """Return where issues opened and the training was resumed."""
    sources = {report.source for report in reports}
    steps = {step for source, found in resumed.items() if source in sources for step in found}
    return sorted([*figures.events_of(reports), *((step, "resumed") for step in steps)])


def draw_training_curves(reports: Sequence[StepReport], *, resumed: Resumed = NEVER) -> Any:
    """Draw loss, norms before and after clipping, non-finite counts and clip rate, with events where they happened.

    Several pairs have a colour each. `resumed` are the steps of each after which the training was resumed.
    """
    figure = figures.new_figure()
    figure.suptitle("Training curves", fontsize=14)
    pairs = list(by_source(reports).values()) or [[]]
    _loss(panel(figure, (2, 2, 1), "Loss", "step", "loss"), pairs)
    _norms(panel(figure, (2, 2, 2), "Gradient norm", "step", "global L2 norm"), pairs)
    _nonfinite(panel(figure, (2, 2, 3), "Non-finite gradient elements", "step", "elements"), reports)
    _clipping(panel(figure, (2, 2, 4), "Clipping", "step", "coefficient and share"), pairs)
    events = _marks(reports, resumed)
    for index, axes in enumerate(figure.axes):
        figures.across(axes, _steps(reports))
        figures.mark_events(axes, events, texts=index < 2)
        figures.legend(axes)
    return figures.tidy(figure)


def draw_gradient_statistics(statistics: Sequence[GradientStatistics], *, name: str = "") -> Any:
    """Draw the distributions of norms, means, deviations and extremes, and the correlation of the statistics."""
    figure = figures.new_figure()
    title = f"Gradient statistics of {plural(len(statistics), 'step')}"
    figure.suptitle(_titled(title, name), fontsize=14, parse_math=False)
    order = np.arange(1, len(statistics) + 1)
    table = {name: figures.numbers(getattr(entry, name) for entry in statistics) for name in _STATISTICS}
    _distribution(panel(figure, (2, 2, 1), "Distribution of norms", "global L2 norm", "steps"), table["total_norm"])
    axes = panel(figure, (2, 2, 2), "Mean and standard deviation", "measured step", "gradient element")
    mean, std = table["mean"], table["std"]
    axes.fill_between(order, mean - std, mean + std, color=SKY, alpha=0.35, linewidth=0, label="mean ± std")
    figures.curve(axes, order, mean, label="mean", colour=BLUE)
    axes = panel(figure, (2, 2, 3), "Extremes", "measured step", "gradient element")
    figures.log_curve(axes, order, np.abs(table["max"]), label="|max|", colour=ORANGE, linewidth=1.1)
    figures.log_curve(axes, order, np.abs(table["min"]), label="|min|", colour=BLUE, linewidth=1.1)
    _correlation(figure, table)
    for index, axes in enumerate(figure.axes[:3]):
        if index:
            figures.across(axes, order)
        if not len(statistics):
            figures.say(axes, _EMPTY)
        figures.legend(axes)
    return figures.tidy(figure)


def draw_gradient_statistics_over_time(
    rows: Mapping[str, Sequence[float | None]],
    *,
    events: Sequence[tuple[float, str]] = (),
    lost: Sequence[int] = (),
    name: str = "",
) -> Any:
    """Draw variance, norm, absolute mean and range over time, each on a log axis.

    `rows` holds lists of equal length, as `gradient_statistics.json` does: `step` and `grad_variance`, `grad_norm`,
    `grad_mean`, `grad_max`, `grad_min`. `events` are steps and texts to be marked, `lost` are steps without a finite
    gradient, and `name` is that of the pair.
    """
    figure = figures.new_figure()
    figure.suptitle(_titled("Gradient statistics over time", name), fontsize=14, parse_math=False)
    table = {name: figures.numbers(values) for name, values in rows.items()}
    steps = table["step"]
    panels = (
        ("Gradient variance", [("variance", table["grad_variance"], BLUE)]),
        ("Gradient norm", [("norm", table["grad_norm"], GREEN)]),
        ("Absolute gradient mean", [("|mean|", np.abs(table["grad_mean"]), PURPLE)]),
        ("Gradient range", [("max", table["grad_max"], ORANGE), ("|min|", np.abs(table["grad_min"]), BLUE)]),
    )
    for index, (title, lines) in enumerate(panels):
        axes = panel(figure, (2, 2, index + 1), title, "step", "")
        for label, values, colour in lines:
            figures.log_curve(axes, steps, values, label=label, colour=colour)
        figures.mark_lost(axes, lost)
        if len(steps) or len(lost):
            figures.across(axes, [*steps, *lost])
            figures.mark_events(axes, events, texts=index < 2)
        if not len(steps):
            figures.say(axes, "No recorded gradient is finite." if len(lost) else _EMPTY)
        figures.legend(axes)
    return figures.tidy(figure)


def by_source(reports: Sequence[StepReport]) -> dict[str, list[StepReport]]:
    """Return the reports of each (model, optimizer) pair by its name."""
    found: dict[str, list[StepReport]] = {}
    for report in reports:
        found.setdefault(report.source, []).append(report)
    return found


def statistics_over_time(reports: Sequence[StepReport]) -> dict[str, list[float | None]]:
    """Return the lists that `draw_gradient_statistics_over_time` draws, from the steps with finite gradients."""
    found = [(one, one.statistics) for one in reports if one.statistics is not None and has_finite(one.statistics)]
    return {
        "step": [report.step for report, _ in found],
        "grad_norm": [report.clipping.norm_before for report, _ in found],
        **{f"grad_{name}": [getattr(whole, name) for _, whole in found] for name in ("variance", "mean", "max", "min")},
    }


def _loss(axes: Any, pairs: Sequence[Sequence[StepReport]]) -> None:
    losses = [figures.numbers(report.loss for report in reports) for reports in pairs]
    everything = np.concatenate(losses)
    for reports in pairs:
        figures.mark_lost(axes, [one.step for one in reports if one.loss is not None and math.isnan(one.loss)])
    if not np.isfinite(everything).any():
        figures.say(axes, "No finite loss was recorded." if pairs[0] else _EMPTY)
        return
    draw = figures.log_curve if spans_decades(everything) else figures.curve
    for index, (reports, values) in enumerate(zip(pairs, losses, strict=True)):
        draw(axes, _steps(reports), values, label=_of("loss", reports), colour=CYCLE[index % len(CYCLE)])


def _norms(axes: Any, pairs: Sequence[Sequence[StepReport]]) -> None:
    if not pairs[0]:
        figures.say(axes, _EMPTY)
        return
    before = [figures.numbers(report.clipping.norm_before for report in reports) for reports in pairs]
    for index, (reports, values) in enumerate(zip(pairs, before, strict=True)):
        steps, clipping = _steps(reports), [report.clipping for report in reports]
        wide, thin = (ORANGE, BLUE) if len(pairs) == 1 else (CYCLE[index % len(CYCLE)],) * 2
        figures.log_curve(
            axes, steps, values, label=_of("before clipping", reports), colour=wide, linewidth=3.2, alpha=0.6
        )
        if any(found.enabled for found in clipping):
            after = figures.numbers(found.norm_after for found in clipping)
            figures.log_curve(axes, steps, after, label=_of("after clipping", reports), colour=thin)
            threshold = figures.numbers(found.threshold for found in clipping)
            if np.isfinite(threshold).any():
                figures.log_curve(axes, steps, threshold, label="threshold", colour=GREY, linestyle="--", linewidth=1.1)
        figures.mark_lost(axes, np.asarray(steps)[np.isnan(values)])
    if not any(np.isfinite(values).any() for values in before):
        figures.say(axes, "No recorded norm is finite.")


def _titled(title: str, name: str) -> str:
    return f"{title}: {plain(name)}" if name else title


def _of(label: str, reports: Sequence[StepReport]) -> str:
    return f"{label}: {plain(reports[0].source, length=24)}" if reports and reports[0].source else label


def _steps(reports: Sequence[StepReport]) -> list[int]:
    return [report.step for report in reports]


def _nonfinite(axes: Any, reports: Sequence[StepReport]) -> None:
    steps = _steps(reports)
    nan = np.array([report.nan_inf.nan_count for report in reports])
    infinite = np.array([report.nan_inf.inf_count for report in reports])
    if not (nan.any() or infinite.any()):
        figures.say(axes, "Every gradient was finite." if reports else _EMPTY)
        axes.set_yticks([])
        return
    for values, label, colour, marker in ((nan, "NaN", BLUE, "o"), (infinite, "Inf", ORANGE, "s")):
        there = np.flatnonzero(values)
        if len(there):
            axes.vlines(np.take(steps, there), 0, values[there], color=colour, alpha=0.5)
            axes.plot(np.take(steps, there), values[there], marker, color=colour, label=label, markersize=5)
    if not (nan.any() and infinite.any()):
        axes.set_ylabel("NaN elements" if nan.any() else "infinite elements")  # one kind has no legend to name it
    highest = max(nan.max(), infinite.max())
    axes.set_ylim(0, 1.15 * highest)
    if highest > 100:
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(0, 3 * highest)


def _clipping(axes: Any, pairs: Sequence[Sequence[StepReport]]) -> None:
    if not any(report.clipping.enabled for reports in pairs for report in reports):
        figures.say(axes, "Clipping was off." if pairs[0] else _EMPTY)
        axes.set_yticks([])
        return
    for index, reports in enumerate(pairs):
        steps = _steps(reports)
        colours = (SKY, ORANGE) if len(pairs) == 1 else (CYCLE[index % len(CYCLE)],) * 2
        # A step that was left out is not clipped, whatever its gradients were.
        coefficients = figures.numbers(None if one.skipped else one.clipping.coefficient for one in reports)
        rates = figures.numbers(one.clipping.clip_rate for one in reports)
        lines = (
            ("clip coefficient", coefficients, "-"),
            ("share of recent steps clipped", rates, "-" if len(pairs) == 1 else "--"),
        )
        for (label, values, style), colour in zip(lines, colours, strict=True):
            figures.curve(axes, steps, values, label=_of(label, reports), colour=colour, linestyle=style)
    axes.set_ylim(0, 1.05)


def _distribution(axes: Any, norms: Any) -> None:
    finite = norms[np.isfinite(norms) & (norms > 0)]
    if not len(finite):
        return
    low, high = finite.min(), finite.max()
    if high > 3 * low:
        axes.set_xscale("log")
        edges = np.geomspace(low, high, 31)
    else:
        edges = np.linspace(low, high, 31) if high > low else np.linspace(low * 0.5, low * 1.5, 32)
    axes.hist(finite, bins=edges, color=SKY, edgecolor="white", linewidth=0.5, label="steps")
    axes.axvline(np.median(finite), color=RED, linestyle="--", label=f"median {np.median(finite):.3g}")
    left = len(norms) - len(finite)
    if left:
        axes.set_xlabel(f"global L2 norm ({left} zero or non-finite left out)")


def _correlation(figure: Any, table: Mapping[str, Any]) -> None:
    axes = panel(figure, (2, 2, 4), "Correlation", "", "")
    axes.grid(visible=False)
    finite = np.all([np.isfinite(values) for values in table.values()], axis=0)
    varying = {name: values[finite] for name, values in table.items() if len(set(values[finite])) > 1}
    if finite.sum() < 3 or len(varying) < 2:
        axes.set_xticks([])
        axes.set_yticks([])
        figures.say(axes, "Three finite steps that differ are needed.")
        return
    matrix = np.corrcoef(list(varying.values()))
    image = axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    labels = [name.replace("total_", "").replace("_", " ") for name in varying]
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
    axes.set_yticks(range(len(labels)), labels)
    for row, column in np.ndindex(matrix.shape):
        colour = "white" if abs(matrix[row, column]) > 0.6 else "black"
        axes.text(column, row, f"{matrix[row, column]:.2f}", ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, ax=axes, label="Pearson r")
