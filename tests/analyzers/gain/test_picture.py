"""The picture of gains, read back from its figure."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradtrack.analyzers.gain import picture
from gradtrack.drawing import figures
from tests.analyzers.pictured import drawn, train
from tests.pages.runs import HOSTILE
from tests.pages.test_pictures import PNG, line, texts


def test_gains_are_bars_around_one_and_add_up_over_depth() -> None:
    """A bar is the logarithm of its gain; the total multiplies from the output back to the input."""
    gain, total = picture.draw_gain([0.5, 4.0, 0.25]).axes
    heights = sorted(bar.get_height() for bar in gain.patches if bar.get_width() < 0.9)
    assert heights == pytest.approx(sorted(np.log([0.5, 4.0, 0.25])))
    assert line(total, "total gain").get_ydata() == pytest.approx([0.5, 1.0, 0.25])


def test_both_panels_name_their_transitions() -> None:
    """The total over depth is read by the same names as the gains."""
    for axes in picture.draw_gain([0.5, 4.0], names=["a to b", "b to c"]).axes:
        assert [label.get_text() for label in axes.get_xticklabels()] == ["a to b", "b to c"]


def test_unknown_and_blocked_gains_are_named() -> None:
    """A gain that is not known and one without limit have no bar but a word."""
    gain, total = picture.draw_gain([0.5, None, math.inf, 1.0]).axes
    assert texts(gain) == ["unknown", "blocked"]
    assert np.array_equal(line(total, "total gain").get_ydata(), [np.nan, np.nan, np.nan, 1.0], equal_nan=True)


def test_gains_of_a_blocked_gradient_say_so() -> None:
    """Where nothing passes there is no curve, and no axis that pretends one."""
    bars, total = picture.draw_gain([0.0, 0.0]).axes
    assert [text.get_text() for text in bars.texts] == ["blocked", "blocked"]
    assert [text.get_text() for text in total.texts] == ["No gradient is known to pass."]


def test_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last gains are drawn, named by their blocks without what all names begin with."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    reports = train(nn.ModuleDict({"body": blocks})["body"], "gain", lambda: torch.randn(5, 4))
    gains, options = drawn(reports, "gradient_gain.png", picture, "draw_gain", monkeypatch)
    assert gains == [one.analyzers["gain"] for one in reports if "gain" in one.analyzers][-1]["gains"]
    assert options["names"] == ["0 to 1", "1 to 2"]


def test_pictures_survive_emptiness(tmp_path: Path) -> None:
    """Nothing to draw and names of any kind still make pictures."""
    paths = (tmp_path / f"{number}.png" for number in itertools.count())
    for written in (
        figures.save(picture.draw_gain([]), next(paths)),
        figures.save(picture.draw_gain([1.0, 0.0], names=[HOSTILE, "$"]), next(paths)),
    ):
        assert written.read_bytes().startswith(PNG)
