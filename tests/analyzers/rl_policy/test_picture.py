"""The picture of a policy, read back from its figure."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from gradtrack import RLPolicyAnalyzer
from gradtrack.analyzers.rl_policy import picture
from gradtrack.drawing import figures
from tests.analyzers.pictured import drawn, train
from tests.pages.test_pictures import PNG, line, texts


def test_policy_shows_entropy_beside_returns() -> None:
    """Entropy and returns have an axis each, and the floor is a line."""
    axes, other = picture.draw_policy([1, 2], [0.9, 0.5], returns=[10.0, 20.0], floor=0.1).axes
    assert list(line(axes, "entropy").get_ydata()) == [0.9, 0.5]
    assert line(axes, "floor 0.1").get_ydata()[0] == 0.1
    assert list(line(other, "return (right)").get_ydata()) == [10.0, 20.0]


def test_policy_marks_where_an_issue_opened() -> None:
    """Events are marked, and returns that were not passed have no axis."""
    (axes,) = picture.draw_policy([1, 2], [0.9, 0.05], returns=[None, None], events=[(2, "ENTROPY_COLLAPSE")]).axes
    assert texts(axes) == ["ENTROPY_COLLAPSE"]


def test_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The normalized entropy of every look is drawn with the returns of that time and its floor."""
    actor = nn.Linear(3, 4)
    nn.init.zeros_(actor.weight)
    nn.init.zeros_(actor.bias)
    reports = train(actor, RLPolicyAnalyzer(actor), lambda: torch.randn(5, 3))
    steps, entropy, options = drawn(reports, "policy_entropy.png", picture, "draw_policy", monkeypatch)
    assert steps == [step for step in range(1, 10) if "rl_policy" in reports[step - 1].analyzers]
    assert entropy[0] == pytest.approx(1.0)
    assert options["returns"] == [3.0] * len(steps)
    assert options["floor"] == 0.1
    assert math.isfinite(sum(entropy))


def test_pictures_survive_emptiness(tmp_path: Path) -> None:
    """Nothing to draw and names of any kind still make pictures."""
    paths = (tmp_path / f"{number}.png" for number in itertools.count())
    for written in (
        figures.save(picture.draw_policy([], []), next(paths)),
        figures.save(picture.draw_policy([1], [None], returns=[math.nan]), next(paths)),
    ):
        assert written.read_bytes().startswith(PNG)
