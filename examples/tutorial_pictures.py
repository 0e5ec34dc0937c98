"""Run the three trainings of docs/tutorial.md as they are printed there, and draw what a tracker would show of them.

python examples/tutorial_pictures.py docs/images
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
PICTURES = (
    ("dying", "dying", "mended", "loss", "train/grad_norm"),
    ("chaotic", "chaotic", "steady", "train/grad_norm", "rnn/lyapunov_exponent"),
    ("policy", "collapsed", "exploring", "rl/discrete_entropy_normalized", "rl/episode_return"),
)


def run_page() -> dict[str, Any]:
    """Run the blocks of the page one after the other, and return what they leave behind."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def curve(manager: Any, name: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of a metric, or of the loss."""
    records = manager.backend("memory").records
    found = [(one.step, one.loss if name == "loss" else one.metrics.get(name)) for one in records]
    known = [(step, value) for step, value in found if value is not None]
    return [step for step, _ in known], [value for _, value in known]


def draw(path: Path, broken: Any, mended: Any, metrics: Sequence[str]) -> None:
    """Draw each metric of a broken run and of the mended one."""
    figure = Figure(figsize=(7.2, 2.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(metrics)), metrics, strict=True):
        for manager, label, colour in ((broken, "broken", "#c05621"), (mended, "mended", "#2b6cb0")):
            axes.plot(
                *curve(manager, name), label=label, color=colour, linewidth=1.4, marker=_marker(name), markersize=3
            )
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if name in ("loss", "train/grad_norm"):
            axes.set_yscale("log")
    figure.axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=90)


def _marker(name: str) -> str:
    return "o" if name.startswith("rnn/") else ""


def main(directory: str = "docs/images") -> None:
    """Write the pictures of the page."""
    names = run_page()
    for picture, broken, mended, *metrics in PICTURES:
        path = Path(directory) / f"tutorial_{picture}.png"
        draw(path, names[broken], names[mended], metrics)
        print(f"wrote {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
