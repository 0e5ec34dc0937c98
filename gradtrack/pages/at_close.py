"""Writes the files of a run's end into its directory: how it ended, pictures, and the HTML report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from gradtrack.reports import GradientStatistics, StepReport
from gradtrack.support.interrupts import pass_on

_logger = logging.getLogger("gradtrack")


def save_pictures(
    directory: Path, run_id: str, reports: Sequence[StepReport], statistics: Sequence[GradientStatistics]
) -> list[Path]:
    """Draw the pictures of a run, if matplotlib is installed: of its reports, and of what was recorded before them."""
    if not reports or find_spec("matplotlib") is None:
        return []
    from gradtrack.pages.pictures import pictures_of
    from gradtrack.pages.run_data import recorded_reports

    try:
        first = {report.source: report.step for report in reversed(reports)}
        earlier, resumed = recorded_reports(f"{directory}@{run_id}", first)
        known = [*(report.statistics for report in earlier if report.statistics is not None), *statistics]
        pictures = pictures_of([*earlier, *reports], known, resumed=resumed)
    except Exception as fault:
        pass_on(fault)
        _logger.warning("no picture could be drawn; the training is not affected", exc_info=True)
        return []
    return [path for name, draw in pictures.items() for path in contained(name, partial(draw, directory / name))]


def save_page(directory: Path, run_id: str, pictures: Sequence[Path] = ()) -> list[Path]:
    """Write the HTML report of the run, with the pictures that no chart replaces."""
    from gradtrack.pages.html import write_html_report
    from gradtrack.pages.run_data import load_run

    if not any(directory.glob("journal-*.jsonl")):
        return []  # no row was recorded; the run has logged that
    return contained("the report", lambda: write_html_report(load_run(f"{directory}@{run_id}"), pictures=pictures))


def contained(what: str, write: Callable[[], Path]) -> list[Path]:
    """Write a file; log a failure instead of raising it, because it must not end a training."""
    try:
        return [write()]
    except Exception as fault:
        pass_on(fault)
        _logger.warning("%s could not be written; the training is not affected", what, exc_info=True)
        return []
