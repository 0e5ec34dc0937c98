"""What lies in a run directory, and how to open each file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

_WAYS: Final = (
    ("report.html", "the whole run on one page: open it in a browser"),
    ("training_curves.png", "loss, norms, non-finite values and clipping over time: open it in an image viewer"),
    ("gradient_statistics.png", "variance, norm, mean and range over time: open it in an image viewer"),
    ("gradient_stats.png", "distribution and correlation of the statistics: open it in an image viewer"),
    ("gradient_statistics.json", "the global statistics as lists: json.load(open(path))"),
    ("gradient_statistics_weight_matrices.json", "the statistics of each group as lists: json.load(open(path))"),
    ("training_log.json", "configuration, summary and the last steps: json.load(open(path))"),
)


def ways_to_open(directory: Path) -> list[tuple[Path, str]]:
    """Return the files of a run that a person may want, each with how to open it."""
    found = [(directory / name, way) for name, way in _WAYS if (directory / name).is_file()]
    events = {path.parent for path in directory.rglob("events.out.tfevents.*")}
    highest = sorted(path for path in events if not events & set(path.parents))
    return found + [(path, f"TensorBoard: tensorboard --logdir {shlex.quote(str(path))}") for path in highest]
