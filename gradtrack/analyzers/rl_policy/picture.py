"""The picture of a policy: its entropy together with its returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from gradtrack.drawing import figures
from gradtrack.drawing.figures import BLUE, ORANGE, RED, curve, events_of, mark_events, panel
from gradtrack.reports import StepReport

_FLOOR: Final = 0.1


def pictures_of(reports: Sequence[StepReport]) -> Mapping[str, Callable[[Path], Path]]:
    """Draw all looks; where a policy has both kinds of actions, the discrete ones."""
    looks = [(report.step, report.analyzers["rl_policy"]) for report in reports if "rl_policy" in report.analyzers]
    discrete = [found["discrete_entropy_normalized"] for _, found in looks]
    is_discrete = any(value is not None for value in discrete)
    entropy = discrete if is_discrete else [found["continuous_entropy_normalized"] for _, found in looks]
    if all(value is None for value in entropy):
        return {}
    return {
        "policy_entropy": lambda path: figures.save(
            draw_policy(
                [step for step, _ in looks],
                entropy,
                returns=[found["episode_return"] for _, found in looks],
                floor=_FLOOR if is_discrete else None,
                events=events_of(reports),
            ),
            path,
        )
    }


def draw_policy(
    steps: Sequence[int],
    entropy: Sequence[float | None],
    *,
    returns: Sequence[float | None] = (),
    floor: float | None = None,
    events: Sequence[tuple[float, str]] = (),
) -> Any:
    """Return a figure of a policy's normalized entropy and its returns, which tell a collapse from a conclusion.

    `events` are steps and texts to be marked.
    """
    figure = figures.new_figure(10.0, 5.0)
    axes = panel(figure, (1, 1, 1), "Policy entropy and returns", "update", "normalized entropy")
    curve(axes, steps, figures.numbers(entropy), label="entropy", colour=BLUE)
    if floor is not None:
        axes.axhline(floor, color=RED, linestyle="--", linewidth=1.0, label=f"floor {floor:g}")
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), max(1.0, axes.get_ylim()[1]))
    others = []
    if np.isfinite(figures.numbers(returns)).any():
        others = [axes.twinx()]
        others[0].spines["top"].set_visible(False)
        curve(others[0], steps, figures.numbers(returns), label="return (right)", colour=ORANGE, linestyle="--")
        others[0].set_ylabel("return")
    figures.across(axes, steps)
    mark_events(axes, events)
    figures.legend(axes, *others, below=True)
    return figures.tidy(figure)
