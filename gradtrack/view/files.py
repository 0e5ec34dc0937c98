"""What lies in a run directory, and how to open each file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

_WAYS: Final = (
    ("report.html", "browser: the whole run on one page"),
    ("training_curves.png", "image viewer: loss, norms, non-finite values, clipping"),
    ("gradient_statistics.png", "image viewer: variance, norm, mean, range"),
    ("gradient_flow.png", "image viewer: the norm of each group over time"),
    ("gradient_stats.png", "image viewer: distributions, correlation"),
    ("gradient_statistics.json", "json.load: the global statistics as lists"),
    ("gradient_statistics_weight_matrices.json", "json.load: each group as lists"),
    ("training_log.json", "json.load: configuration, summary, last steps"),
)


def ways_to_open(directory: Path) -> list[tuple[Path, str]]:
    """Return the files of a run that a person may want, each with how to open it."""
    found = [(directory / name, way) for name, way in _WAYS if (directory / name).is_file()]
    events = {path.parent for path in directory.rglob("events.out.tfevents.*")}
    highest = sorted(path for path in events if not events & set(path.parents))
    return found + [(path, f"tensorboard --logdir {shlex.quote(str(path))}") for path in highest]
