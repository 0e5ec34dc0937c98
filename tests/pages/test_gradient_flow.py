"""The picture of the gradient flow, read back from its figure."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from gradtrack.drawing import figures
from gradtrack.pages import gradient_flow as picture
from gradtrack.pages.gradient_flow import flow_of
from tests.pages.runs import HOSTILE, issue, report, unhealthy
from tests.pages.test_pictures import GROUP, PNG, texts


def test_flow_over_time_is_a_map_of_layers_and_steps() -> None:
    """Each row is a layer, each column a step, each colour the logarithm of a norm; zeros stay visible."""
    figure = picture.draw_gradient_flow({"first": [1.0, 0.1, 0.0], "last": [1.0, None, math.inf]}, steps=[10, 20, 30])
    axes, colours = figure.axes
    shown = np.ma.filled(np.ma.masked_invalid(axes.images[0].get_array()), np.nan)
    assert shown[0] == pytest.approx([0.0, -1.0, -2.0])
    assert np.isnan(shown[1, 1])
    assert shown[1, 2] == pytest.approx(1.0)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "last"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["10", "20", "30"]
    assert "log10" in colours.get_ylabel()


def test_issues_are_marked_on_their_cell() -> None:
    """An issue is drawn at its layer and at the step that is nearest to its own."""
    norms = {"first": [1.0, 0.1], "last": [1.0, 1.0]}
    (axes, _) = picture.draw_gradient_flow(norms, steps=[100, 200], issues=[(190, "first", "VANISHING")]).axes
    (mark,) = axes.get_lines()
    assert (mark.get_xdata()[0], mark.get_ydata()[0]) == (1, 0)
    assert texts(axes) == ["VANISHING"]


def test_flow_of_one_step_is_bars() -> None:
    """One step is drawn as a bar per layer, and a layer without a gradient says so."""
    (axes,) = picture.draw_gradient_flow({"first": [0.5], "dead": [0.0], "none": [None]}).axes
    assert next(bar.get_width() for bar in axes.patches) == 0.5
    assert texts(axes) == ["0", "no gradient"]


def test_the_flow_is_that_of_the_groups() -> None:
    """Each group has its norm at every step, none where nothing was finite, and an issue is marked at its group."""
    group = {name: {**GROUP, "norm": size} for name, size in (("encoder", 2.0), ("head", 3.0))}
    bad = {**group, "head": {**GROUP, "norm": 0.0, "element_count": 2, "nan_count": 2}}
    steps, norms, issues = flow_of(
        [report(1, groups=group), report(2, groups=bad, health=unhealthy(issue("encoder.weight")))]
    )
    assert norms == {"encoder": [2.0, 2.0], "head": [3.0, None]}
    assert (steps, issues) == ([1, 2], [(2, "encoder", "EXPLODING")])


def test_pictures_survive_emptiness(tmp_path: Path) -> None:
    """Nothing to draw and names of any kind still make pictures."""
    paths = (tmp_path / f"{number}.png" for number in itertools.count())
    for figure in (
        picture.draw_gradient_flow({}),
        picture.draw_gradient_flow({HOSTILE: [1.0, math.nan], "$x": [0.0, 0.0]}, issues=[(1, HOSTILE, HOSTILE)]),
        picture.draw_gradient_flow({"all": [math.nan, math.nan]}),
    ):
        assert figures.save(figure, next(paths)).read_bytes().startswith(PNG)
