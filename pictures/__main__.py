"""Make the pictures in docs/images anew: `python -m pictures`, which needs Chromium for pages and tmux for W&B."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from gradtrack.pages.comparison import Comparison
from gradtrack.pages.run_data import load_run
from gradtrack.pages.terminal import overview
from pictures import runs, screens, trackers

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PLOTS = {
    "faulty": (
        "training_curves.png",
        "gradient_statistics.png",
        "gradient_stats.png",
        "gradient_flow.png",
    ),
    "untrained": ("gradient_gain.png",),
    "language_model": ("attention_entropy.png",),
    "recurrent": ("recurrent_spectrum.png",),
    "policy": ("policy_entropy.png",),
}
SCREENS = ("report-desktop.png", "report-dark.png", "report-narrow.png", "comparison.png", "terminal.png")


def draw(directory: Path, names: Sequence[str] = tuple(PLOTS)) -> list[Path]:
    """Train, and keep the pictures that each training leaves."""
    kept = []
    with TemporaryDirectory() as root:
        for name in names:
            train(name, Path(root) / name)
            kept += [Path(shutil.copy(Path(root) / name / picture, directory)) for picture in PLOTS[name]]
    return [screens.shrink(path) for path in kept]


def train(name: str, directory: Path) -> None:
    """Run the training of a name."""
    getattr(runs, name)(directory)


def photograph(directory: Path) -> list[Path]:
    """Train, and take pictures of the pages and the terminal."""
    directory = directory.absolute()
    with TemporaryDirectory() as root, chdir(root):
        faulty, healthy = Path("runs/faulty"), Path("runs/healthy")
        runs.faulty(faulty)
        runs.faulty(healthy, is_faulty=False)
        comparison = Comparison(load_run(healthy), load_run(faulty))
        compared, page = comparison.write_html(Path("diff.html")).absolute(), (faulty / "report.html").absolute()
        return [
            screens.photograph(page, directory / "report-desktop.png", width=1280, height=1484),
            screens.photograph(page, directory / "report-dark.png", width=1280, height=2240, dark=True),
            screens.photograph(page, directory / "report-narrow.png", width=500, height=2000),
            screens.photograph(compared, directory / "comparison.png", width=1280, height=1820),
            screens.photograph_terminal(overview.show(load_run(faulty)), directory / "terminal.png"),
        ]


if __name__ == "__main__":
    for path in [*draw(IMAGES), *photograph(IMAGES), trackers.photograph_wandb(IMAGES)]:
        sys.stdout.write(f"{path.name}: {path.stat().st_size // 1000} kB\n")
