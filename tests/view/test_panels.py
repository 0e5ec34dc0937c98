"""The pictures of what analyzers find, read back from their figures."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from gradtrack.view import panels
from tests.view.runs import HOSTILE
from tests.view.test_plots import PNG, line, texts


def test_flow_over_time_is_a_map_of_layers_and_steps() -> None:
    """Each row is a layer, each column a step, each colour the logarithm of a norm; zeros stay visible."""
    figure = panels.draw_gradient_flow({"first": [1.0, 0.1, 0.0], "last": [1.0, None, math.inf]}, steps=[10, 20, 30])
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
    (axes, _) = panels.draw_gradient_flow(norms, steps=[100, 200], issues=[(190, "first", "VANISHING")]).axes
    (mark,) = axes.get_lines()
    assert (mark.get_xdata()[0], mark.get_ydata()[0]) == (1, 0)
    assert texts(axes) == ["VANISHING"]


def test_flow_of_one_step_is_bars() -> None:
    """One step is drawn as a bar per layer, and a layer without a gradient says so."""
    (axes,) = panels.draw_gradient_flow({"first": [0.5], "dead": [0.0], "none": [None]}).axes
    assert next(bar.get_width() for bar in axes.patches) == 0.5
    assert texts(axes) == ["0", "no gradient"]


def test_gains_are_bars_around_one_and_add_up_over_depth() -> None:
    """A bar is the logarithm of its gain; the total multiplies from the output back to the input."""
    gain, total = panels.draw_gain([0.5, 4.0, 0.25]).axes
    heights = sorted(bar.get_height() for bar in gain.patches if bar.get_width() < 0.9)
    assert heights == pytest.approx(sorted(np.log([0.5, 4.0, 0.25])))
    assert line(total, "total gain").get_ydata() == pytest.approx([0.5, 1.0, 0.25])


def test_unknown_and_blocked_gains_are_named() -> None:
    """A gain that is not known and one without limit have no bar but a word."""
    gain, total = panels.draw_gain([0.5, None, math.inf, 1.0]).axes
    assert texts(gain) == ["?", "blocked"]
    assert np.array_equal(line(total, "total gain").get_ydata(), [np.nan, np.nan, np.nan, 1.0], equal_nan=True)


def test_spectrum_tells_growing_from_decaying_modes() -> None:
    """Eigenvalues inside and outside of the unit circle look different, and the radius is in the title."""
    circle, decay = panels.draw_recurrent_spectrum(
        [0.5 + 0.5j, 0.5 - 0.5j, 1.2], decay=[2.0, 1.0, 0.5], memory_length=1.4, horizon=3
    ).axes
    assert len(line(circle, "decays").get_xdata()) == 2
    assert list(line(circle, "grows").get_xdata()) == [1.2]
    assert "1.2" in circle.get_title(loc="left")
    assert list(line(decay, "decay").get_ydata()) == [1.0, 0.5, 0.25]
    assert line(decay, "memory: 1.4 steps").get_xdata()[0] == 1.4
    assert line(decay, "horizon of the task: 3 steps").get_xdata()[0] == 3
    assert decay.get_yscale() == "log"


def test_policy_shows_entropy_beside_returns() -> None:
    """Entropy and returns have an axis each, and the floor is a line."""
    axes, other = panels.draw_policy([1, 2], [0.9, 0.5], returns=[10.0, 20.0], floor=0.1).axes
    assert list(line(axes, "entropy").get_ydata()) == [0.9, 0.5]
    assert line(axes, "floor 0.1").get_ydata()[0] == 0.1
    assert list(line(other, "return (right)").get_ydata()) == [10.0, 20.0]


def test_attention_is_a_map_of_layers_and_heads() -> None:
    """Each cell is the entropy of one head; a head that is missing in a layer is a dash."""
    axes = panels.draw_attention_entropy([[0.1, 0.9], [0.5]]).axes[0]
    shown = np.ma.filled(np.ma.masked_invalid(axes.images[0].get_array()), np.nan)
    assert np.array_equal(shown, [[0.1, 0.9], [0.5, np.nan]], equal_nan=True)
    assert texts(axes) == ["0.10", "0.90", "0.50", "–"]


def test_policy_marks_where_an_issue_opened() -> None:
    """Events are marked, and returns that nobody passed have no axis."""
    (axes,) = panels.draw_policy([1, 2], [0.9, 0.05], returns=[None, None], events=[(2, "ENTROPY_COLLAPSE")]).axes
    assert texts(axes) == ["ENTROPY_COLLAPSE"]


def test_layers_of_attention_have_their_names() -> None:
    """With names the rows are called by them."""
    axes = panels.draw_attention_entropy([[0.1], [0.5]], names=["first", "second"]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]


def test_a_part_of_the_spectrum_is_said_to_be_one() -> None:
    """The title counts the eigenvalues where there are fewer than the state has dimensions, and not where all are."""
    part, whole = (
        panels.draw_recurrent_spectrum([0.9, 0.5], state_size=size).axes[0].get_title(loc="left") for size in (600, 2)
    )
    assert part == "Spectrum, radius 0.9, outermost 2 of 600"
    assert whole == "Spectrum, radius 0.9"


def test_gains_of_a_blocked_gradient_say_so() -> None:
    """Where nothing passes there is no curve, and no axis that pretends one."""
    bars, total = panels.draw_gain([0.0, 0.0]).axes
    assert [text.get_text() for text in bars.texts] == ["blocked", "blocked"]
    assert [text.get_text() for text in total.texts] == ["No gradient is known to pass."]


def test_every_picture_survives_emptiness_and_hostile_names(tmp_path: Path) -> None:
    """Nothing to draw and names of any kind still make pictures."""
    paths = (tmp_path / f"{number}.png" for number in itertools.count())
    for written in (
        panels.plot_gradient_flow({}, next(paths)),
        panels.plot_gradient_flow(
            {HOSTILE: [1.0, math.nan], "$x": [0.0, 0.0]}, next(paths), issues=[(1, HOSTILE, HOSTILE)]
        ),
        panels.plot_gradient_flow({"all": [math.nan, math.nan]}, next(paths)),
        panels.plot_gain([], next(paths)),
        panels.plot_gain([1.0, 0.0], next(paths), names=[HOSTILE, "$"]),
        panels.plot_recurrent_spectrum([], next(paths)),
        panels.plot_recurrent_spectrum([complex("nan")], next(paths), decay=[0.0, 0.0], memory_length=math.inf),
        panels.plot_policy([], [], next(paths)),
        panels.plot_policy([1], [None], next(paths), returns=[math.nan]),
        panels.plot_attention_entropy([], next(paths)),
    ):
        assert written.read_bytes().startswith(PNG)
