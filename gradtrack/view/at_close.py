"""The pictures that a run leaves in its directory when it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from gradtrack.reports import GradientStatistics, StepReport

_logger = logging.getLogger("gradtrack")


def save_pictures(
    directory: Path, reports: Sequence[StepReport], statistics: Sequence[GradientStatistics]
) -> list[Path]:
    """Draw what the reports hold, where matplotlib is there; a picture that fails is logged and left out."""
    if not reports or find_spec("matplotlib") is None:
        return []
    from gradtrack.view import plots

    pictures: dict[str, Callable[[Path], Path]] = {
        "training_curves.png": lambda path: plots.plot_training_curves(reports, path),
        "gradient_statistics.png": lambda path: plots.plot_gradient_statistics_over_time(
            plots.statistics_over_time(reports), path
        ),
        "gradient_stats.png": lambda path: plots.plot_gradient_statistics(statistics, path),
    }
    written = []
    for name, draw in pictures.items():
        try:
            written.append(draw(directory / name))
        except Exception:
            _logger.warning("the picture %s could not be drawn; the training is not affected", name, exc_info=True)
    return written
