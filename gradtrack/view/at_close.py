"""What a run leaves in its directory when it ends: how it ended, pictures, and the report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from gradtrack.record.run_end import RUN_END, RunEnd
from gradtrack.reports import GradientStatistics, StepReport

_logger = logging.getLogger("gradtrack")


def save_run_end(directory: Path, end: RunEnd) -> list[Path]:
    """Write how the run ended."""
    return _contained("how the run ended", lambda: end.save(directory / RUN_END))


def save_pictures(
    directory: Path, reports: Sequence[StepReport], statistics: Sequence[GradientStatistics]
) -> list[Path]:
    """Draw what the reports hold, where matplotlib is there."""
    if not reports or find_spec("matplotlib") is None:
        return []
    from gradtrack.view import panels, plots

    def over_time(path: Path) -> Path:
        return plots.plot_gradient_statistics_over_time(plots.statistics_over_time(reports), path)

    def flow(path: Path) -> Path:
        steps, norms, issues = _flow(reports)
        return panels.plot_gradient_flow(norms, path, steps=steps, issues=issues)

    pictures: dict[str, Callable[[Path], Path]] = {
        "training_curves.png": lambda path: plots.plot_training_curves(reports, path),
        "gradient_statistics.png": over_time,
        "gradient_stats.png": lambda path: plots.plot_gradient_statistics(statistics, path),
        "gradient_flow.png": flow,
    }
    return [path for name, draw in pictures.items() for path in _contained(name, partial(draw, directory / name))]


def _flow(
    reports: Sequence[StepReport],
) -> tuple[list[int], dict[str, list[float | None]], list[tuple[int, str, str]]]:
    """Return steps, the norm of each group at each of them, and where an issue opened, for the first pair's groups."""
    found = [report for report in reports if report.groups and report.source == reports[0].source]
    names = dict.fromkeys(name for report in found for name in report.groups)
    norms = {name: [report.groups[name].norm if name in report.groups else None for report in found] for name in names}
    opened: dict[str, tuple[int, str, str]] = {}
    for report in found:
        for issue in report.health.issues:
            group = next((name for name in names if f"{issue.layer}.".startswith(f"{name}.")), None)
            if group is not None:
                opened.setdefault(issue.key, (report.step, group, issue.issue_type.value))
    return [report.step for report in found], norms, list(opened.values())


def save_page(directory: Path) -> list[Path]:
    """Write the report of the run."""
    from gradtrack.view.html import write_html_report
    from gradtrack.view.run_data import load_run

    return _contained("the report", lambda: write_html_report(load_run(directory)))


def _contained(what: str, write: Callable[[], Path]) -> list[Path]:
    """Write a file; one that fails is logged and left out, since it must not end a training."""
    try:
        return [write()]
    except Exception:
        _logger.warning("%s could not be written; the training is not affected", what, exc_info=True)
        return []
