"""Which pictures a training leaves: its curves and statistics, and one of what each analyzer saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from gradtrack.record.naming import file_part
from gradtrack.reports import GradientStatistics, StepReport
from gradtrack.reports.parts import has_finite
from gradtrack.view import depth, panels, plots
from gradtrack.view.recorded import recorded_statistics

Drawer = Callable[[Path], Path]
_POLICY_FLOOR = 0.1


def pictures_of(
    reports: Sequence[StepReport], statistics: Sequence[GradientStatistics], *, directory: Path | None = None
) -> dict[str, Drawer]:
    """Return what draws each picture, by its file name; several pairs have some of their own, named after them.

    The journals of `directory` give the statistics of steps that are no longer among the reports.
    """
    found: dict[str, Drawer] = {"training_curves.png": lambda path: plots.plot_training_curves(reports, path)}
    pairs = plots.by_source(reports)
    for source, own in pairs.items():
        known = statistics if len(pairs) == 1 else [one.statistics for one in own if one.statistics is not None]
        tail = f".{file_part(source)}" if source and len(pairs) > 1 else ""
        pictures = _pictures_of_pair(own, known, directory, source if tail else "")
        found |= {f"{name}{tail}.png": draw for name, draw in pictures.items()}
    return found


def _pictures_of_pair(
    reports: Sequence[StepReport], statistics: Sequence[GradientStatistics], directory: Path | None, title: str
) -> dict[str, Drawer]:
    over_time = plots.statistics_over_time(reports)
    if directory is not None:
        # A long or resumed training began before the oldest report that is still in memory.
        earlier = recorded_statistics(directory, source=reports[0].source, before=reports[0].step)
        over_time = {name: earlier[name] + values for name, values in over_time.items()}
    steps, norms, issues = flow_of(reports)
    return {
        "gradient_statistics": lambda path: plots.plot_gradient_statistics_over_time(
            over_time,
            path,
            events=plots.events_of(reports),
            lost=plots.steps_without_finite(reports),
            name=title,
        ),
        "gradient_stats": lambda path: plots.plot_gradient_statistics(statistics, path, name=title),
        "gradient_flow": lambda path: depth.plot_gradient_flow(norms, path, steps=steps, issues=issues, name=title),
        **_pictures_of_analyzers(reports),
    }


def flow_of(
    reports: Sequence[StepReport],
) -> tuple[list[int], dict[str, list[float | None]], list[tuple[int, str, str]]]:
    """Return steps, the norm of each group at each of them, and where an issue opened."""
    found = [report for report in reports if report.groups]
    names = dict.fromkeys(name for report in found for name in report.groups)
    norms = {name: [_norm_of(report, name) for report in found] for name in names}
    opened: dict[str, tuple[int, str, str]] = {}
    for report in found:
        for issue in report.health.issues:
            group = next((name for name in names if f"{issue.layer}.".startswith(f"{name}.")), None)
            if group is not None:
                opened.setdefault(issue.key, (report.step, group, issue.issue_type.value))
    return [report.step for report in found], norms, list(opened.values())


def _norm_of(report: StepReport, group: str) -> float | None:
    """Return the norm of a group, or None where it had no finite gradient at all."""
    found = report.groups.get(group)
    return found.norm if found is not None and has_finite(found) else None


def _pictures_of_analyzers(reports: Sequence[StepReport]) -> dict[str, Drawer]:
    """Draw the last of what is a picture by itself, and what changes over time as a whole."""
    last = {name: one for report in reports for name, one in report.analyzers.items()}
    makers: Mapping[str, tuple[str, Callable[[Any], Drawer | None]]] = {
        "gain": ("gradient_gain", _gain),
        "recurrent": ("recurrent_spectrum", _spectrum),
        "transformer": ("attention_entropy", _attention),
    }
    found: dict[str, Drawer | None] = {
        picture: make(last[name]) for name, (picture, make) in makers.items() if name in last
    }
    if "rl_policy" in last:
        found["policy_entropy"] = _policy(reports)
    return {picture: draw for picture, draw in found.items() if draw is not None}


def _gain(report: Any) -> Drawer | None:
    parts = [block.split(".") for block in report.blocks]
    shared = next((depth for depth, names in enumerate(zip(*parts, strict=False)) if len(set(names)) > 1), 0)
    names = [f"{before} to {after}" for before, after in pairwise(".".join(names[shared:]) for names in parts)]
    return partial(_drawn, depth.plot_gain, report.gains, names=names) if report.gains else None


def _spectrum(report: Any) -> Drawer | None:
    cells = [cell for cell in report.cells.values() if cell.spectral_radius is not None]
    if not cells:
        return None
    largest = max(cells, key=lambda cell: cell.spectral_radius)
    return partial(
        _drawn,
        panels.plot_recurrent_spectrum,
        [complex(*value) for value in largest.eigenvalues],
        decay=largest.decay_profile[1:],
        memory_length=largest.effective_memory_length,
        horizon=report.horizon,
        state_size=largest.state_size,
    )


def _attention(report: Any) -> Drawer | None:
    if not report.layers:
        return None
    entropy = [[head.entropy for head in layer.heads] for layer in report.layers]
    return partial(_drawn, panels.plot_attention_entropy, entropy, names=[layer.name for layer in report.layers])


def _policy(reports: Sequence[StepReport]) -> Drawer | None:
    found = [(report.step, report.analyzers["rl_policy"]) for report in reports if "rl_policy" in report.analyzers]
    discrete = [one["discrete_entropy_normalized"] for _, one in found]
    entropy = (
        discrete
        if any(value is not None for value in discrete)
        else [one["continuous_entropy_normalized"] for _, one in found]
    )
    if all(value is None for value in entropy):
        return None

    def draw(path: Path) -> Path:
        return panels.plot_policy(
            [step for step, _ in found],
            entropy,
            path,
            returns=[one["episode_return"] for _, one in found],
            floor=_POLICY_FLOOR if entropy is discrete else None,
            events=plots.events_of(reports),
        )

    return draw


def _drawn(plot: Callable[..., Path], values: Any, path: Path, **options: Any) -> Path:
    return plot(values, path, **options)
