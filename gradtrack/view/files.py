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
    ("gradient_gain.png", "image viewer: the gain from block to block"),
    ("recurrent_spectrum.png", "image viewer: eigenvalues on the unit circle, decay back in time"),
    ("policy_entropy.png", "image viewer: entropy of the policy, and returns"),
    ("attention_entropy.png", "image viewer: entropy of every head"),
    ("gradient_statistics.json", "json.load: the global statistics as lists"),
    ("gradient_statistics_weight_matrices.json", "json.load: each group as lists"),
    ("training_log.json", "json.load: configuration, summary, last steps"),
)


def ways_to_open(directory: Path) -> list[tuple[Path, str]]:
    """Return the files of a run that a person may want, each with how to open it."""
    found = []
    for name, way in _WAYS:
        head, _, ending = name.partition(".")
        of_pairs = sorted(directory.glob(f"{head}.*.{ending}"))
        found += [(path, way) for path in (directory / name, *of_pairs) if path.is_file()]
    events = {path.parent for path in directory.rglob("events.out.tfevents.*")}
    highest = sorted(path for path in events if not events & set(path.parents))
    return found + [(path, f"tensorboard --logdir {shlex.quote(str(path))}") for path in highest]
