"""The picture of a recurrent network, read back from its figure."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradtrack.analyzers.recurrent import picture
from gradtrack.analyzers.recurrent.dynamics import effective_memory
from gradtrack.drawing import figures
from tests.analyzers.pictured import drawn, train
from tests.pages.test_pictures import PNG, line


def test_spectrum_tells_growing_from_decaying_modes() -> None:
    """Eigenvalues inside and outside of the unit circle look different, and the radius is in the title."""
    circle, decay = picture.draw_recurrent_spectrum(
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
    axes = picture.draw_recurrent_spectrum([0.8], decay=profile, memory_length=found.length).axes[1]
    end = line(axes, f"memory: {found.length:.4g} steps").get_xdata()[0]
    curve = line(axes, "decay")
    assert np.interp(end, curve.get_xdata(), np.log(curve.get_ydata())) == pytest.approx(-1.0)


def test_a_part_of_the_spectrum_is_said_to_be_one() -> None:
    """The title counts the eigenvalues where there are fewer than the state has dimensions, and not where all are."""
    part, whole = (
        picture.draw_recurrent_spectrum([0.9, 0.5], state_size=size).axes[0].get_title(loc="left") for size in (600, 2)
    )
    assert part == "Spectrum, radius 0.9, outermost 2 of 600"
    assert whole == "Spectrum, radius 0.9"


def test_the_picture_says_which_state_and_what_is_only_a_bound() -> None:
    """The title has the median that the metric is, and a memory that outlasts the sequence is at least so long."""
    circle, decay = picture.draw_recurrent_spectrum(
        [0.9], decay=[1.0, 0.9], memory_length=2.0, radius=0.91, num_states=80, censored=True
    ).axes
    assert circle.get_title(loc="left") == "Spectrum, radius 0.91"
    assert circle.get_xlabel() == "real (radius: median of 80 states; eigenvalues: the state nearest to it)"
    assert line(decay, "memory, at least: 2 steps").get_xdata()[0] == 3.0


def test_recurrent_spectrum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eigenvalues are those of the state Jacobian: of the radius that is reported, around the decay it causes."""
    torch.manual_seed(0)
    reports = train(nn.RNN(2, 6, batch_first=True), "recurrent", lambda: torch.randn(3, 12, 2))
    values, options = drawn(reports, "recurrent_spectrum.png", picture, "draw_recurrent_spectrum", monkeypatch)
    found = [one.analyzers["recurrent"] for one in reports if "recurrent" in one.analyzers][-1]
    (cell,) = found["cells"].values()
    assert len(values) == 6
    low, high = cell.spectral_radius_range
    assert abs(max(map(abs, values)) - cell.spectral_radius) < 0.2 * (high - low)
    assert (options["radius"], options["num_states"]) == (cell.spectral_radius, cell.spectral_radius_count)
    assert options["censored"] == cell.censored
    assert options["horizon"] == 7
    assert options["decay"] == cell.decay_profile[1:]
    assert options["memory_length"] == cell.effective_memory_length
    assert options["state_size"] == 6


def test_pictures_survive_emptiness(tmp_path: Path) -> None:
    """Nothing to draw and names of any kind still make pictures."""
    for figure in (
        picture.draw_recurrent_spectrum([]),
        picture.draw_recurrent_spectrum([complex("nan")], decay=[0.0, 0.0], memory_length=math.inf),
    ):
        assert figures.save(figure, tmp_path / "picture.png").read_bytes().startswith(PNG)
