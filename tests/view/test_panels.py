"""The pictures of what analyzers find inside of a network, read back from their figures."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from gradtrack.measure.dynamics import effective_memory
from gradtrack.view import panels
from tests.view.test_plots import PNG, line, texts


def test_spectrum_tells_growing_from_decaying_modes() -> None:
    """Eigenvalues inside and outside of the unit circle look different, and the radius is in the title."""
    circle, decay = panels.draw_recurrent_spectrum(
        [0.5 + 0.5j, 0.5 - 0.5j, 1.2], decay=[2.0, 1.0, 0.5], memory_length=1.4, horizon=3
    ).axes
    assert len(line(circle, "decays").get_xdata()) == 2
    assert list(line(circle, "grows").get_xdata()) == [1.2]
    assert "1.2" in circle.get_title(loc="left")
    assert list(line(decay, "decay").get_ydata()) == [1.0, 0.5, 0.25]
    assert line(decay, "horizon of the task: 3 steps").get_xdata()[0] == 3
    assert decay.get_yscale() == "log"


def test_memory_ends_where_the_decay_is_down_to_its_share() -> None:
    """The line of the memory meets the curve at 1/e: both count from lag 1 on, of which everything is there."""
    profile = [3.0 * math.exp(-lag / 4) for lag in range(12)]
    found = effective_memory([math.log(value) for value in profile])
    assert found is not None
    axes = panels.draw_recurrent_spectrum([0.8], decay=profile, memory_length=found.length).axes[1]
    end = line(axes, f"memory: {found.length:.4g} steps").get_xdata()[0]
    curve = line(axes, "decay")
    assert np.interp(end, curve.get_xdata(), np.log(curve.get_ydata())) == pytest.approx(-1.0)


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


def test_pictures_survive_emptiness(tmp_path: Path) -> None:
    """Nothing to draw still makes pictures."""
    paths = (tmp_path / f"{number}.png" for number in itertools.count())
    for written in (
        panels.plot_recurrent_spectrum([], next(paths)),
        panels.plot_recurrent_spectrum([complex("nan")], next(paths), decay=[0.0, 0.0], memory_length=math.inf),
        panels.plot_policy([], [], next(paths)),
        panels.plot_policy([1], [None], next(paths), returns=[math.nan]),
        panels.plot_attention_entropy([], next(paths)),
    ):
        assert written.read_bytes().startswith(PNG)
