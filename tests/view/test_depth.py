"""The pictures of gradients over depth, read back from their figures."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from gradtrack.view import depth
from tests.view.runs import HOSTILE
from tests.view.test_plots import PNG, line, texts


def test_flow_over_time_is_a_map_of_layers_and_steps() -> None:
    """Each row is a layer, each column a step, each colour the logarithm of a norm; zeros stay visible."""
    figure = depth.draw_gradient_flow({"first": [1.0, 0.1, 0.0], "last": [1.0, None, math.inf]}, steps=[10, 20, 30])
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
    (axes, _) = depth.draw_gradient_flow(norms, steps=[100, 200], issues=[(190, "first", "VANISHING")]).axes
    (mark,) = axes.get_lines()
    assert (mark.get_xdata()[0], mark.get_ydata()[0]) == (1, 0)
    assert texts(axes) == ["VANISHING"]


def test_flow_of_one_step_is_bars() -> None:
    """One step is drawn as a bar per layer, and a layer without a gradient says so."""
    (axes,) = depth.draw_gradient_flow({"first": [0.5], "dead": [0.0], "none": [None]}).axes
    assert next(bar.get_width() for bar in axes.patches) == 0.5
    assert texts(axes) == ["0", "no gradient"]


def test_gains_are_bars_around_one_and_add_up_over_depth() -> None:
    """A bar is the logarithm of its gain; the total multiplies from the output back to the input."""
    gain, total = depth.draw_gain([0.5, 4.0, 0.25]).axes
    heights = sorted(bar.get_height() for bar in gain.patches if bar.get_width() < 0.9)
    assert heights == pytest.approx(sorted(np.log([0.5, 4.0, 0.25])))
    assert line(total, "total gain").get_ydata() == pytest.approx([0.5, 1.0, 0.25])


def test_both_panels_name_their_transitions() -> None:
    """The total over depth is read by the same names as the gains."""
    for axes in depth.draw_gain([0.5, 4.0], names=["a to b", "b to c"]).axes:
        assert [label.get_text() for label in axes.get_xticklabels()] == ["a to b", "b to c"]


def test_unknown_and_blocked_gains_are_named() -> None:
    """A gain that is not known and one without limit have no bar but a word."""
    gain, total = depth.draw_gain([0.5, None, math.inf, 1.0]).axes
    assert texts(gain) == ["unknown", "blocked"]
    assert np.array_equal(line(total, "total gain").get_ydata(), [np.nan, np.nan, np.nan, 1.0], equal_nan=True)


def test_gains_of_a_blocked_gradient_say_so() -> None:
    """Where nothing passes there is no curve, and no axis that pretends one."""
    bars, total = depth.draw_gain([0.0, 0.0]).axes
    assert [text.get_text() for text in bars.texts] == ["blocked", "blocked"]
    assert [text.get_text() for text in total.texts] == ["No gradient is known to pass."]


def test_pictures_survive_emptiness_and_hostile_names(tmp_path: Path) -> None:
    """Nothing to draw and names of any kind still make pictures."""
    paths = (tmp_path / f"{number}.png" for number in itertools.count())
    for written in (
        depth.plot_gradient_flow({}, next(paths)),
        depth.plot_gradient_flow(
            {HOSTILE: [1.0, math.nan], "$x": [0.0, 0.0]}, next(paths), issues=[(1, HOSTILE, HOSTILE)]
        ),
        depth.plot_gradient_flow({"all": [math.nan, math.nan]}, next(paths)),
        depth.plot_gain([], next(paths)),
        depth.plot_gain([1.0, 0.0], next(paths), names=[HOSTILE, "$"]),
    ):
        assert written.read_bytes().startswith(PNG)
