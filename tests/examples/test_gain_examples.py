"""The examples of the gain monitor run, and the curves they draw are those that were published."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from mean_field import depth_scale, squared_gain
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> dict[str, Any]:
    """Return what an example defines, without running it."""
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize(("weight_std", "expected"), [(0.8, 0.8), (1.5, 1.0674), (2.5, 1.2678)])
def test_the_gain_of_random_tanh_networks_is_that_of_mean_field_theory(weight_std: float, expected: float) -> None:
    """G2: at width 400 and depth 25 the mean gain is the square root of chi_1, to 6 %."""
    assert math.sqrt(squared_gain(weight_std)) == pytest.approx(expected, rel=1e-3)
    assert load("mean_field_gain")["mean_gain"](weight_std) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize(("weight_std", "expected"), [(math.sqrt(2), 1.0), (1.0, math.sqrt(0.5))])
def test_a_relu_network_keeps_its_gradient_at_the_initialisation_of_he(weight_std: float, expected: float) -> None:
    """G3: the gain of ReLU layers is one with variance 2/n, and the root of one half with 1/n."""
    names = load("mean_field_gain")
    blocks = names["random_network"](weight_std, width=400, depth=25, activation=nn.ReLU)
    assert names["watch"](blocks, width=400).summary_stats()["mean_gain"] == pytest.approx(expected, abs=0.05)


def test_the_edge_of_chaos_lies_at_one() -> None:
    """G4: chi_1 is one at sigma_w one without a bias, where the depth scale diverges."""
    assert squared_gain(1.0) == pytest.approx(1.0, abs=2e-2)
    assert depth_scale(1.0) > 1000
    assert depth_scale(0.8) == pytest.approx(-1 / math.log(0.64), rel=1e-6)
    assert squared_gain(0.9) < 1 < squared_gain(1.1)


@pytest.mark.parametrize(("width", "expected"), [(16, 1.66), (128, 0.71)])
def test_narrow_relu_networks_have_log_normal_gradients(width: int, expected: float) -> None:
    """G5: the spread of the logarithm over networks of depth 32 grows with the sum of 1/n (Hanin 2018), to 30 %."""
    names = load("mean_field_gain")
    logs = []
    for seed in range(120):
        blocks = names["random_network"](math.sqrt(2), width=width, depth=32, activation=nn.ReLU, seed=seed)
        gain = names["watch"](blocks, width=width, batch=1, seed=1000 + seed).cumulative_gains()[0]
        if gain:
            logs.append(math.log(gain))
    assert stdev(logs) == pytest.approx(expected, rel=0.3)


def test_the_last_gradient_falls_with_depth_for_pre_norm_only() -> None:
    """G6: from 2 to 16 layers it falls with Pre-LN by 1.9 to 2.9, and hardly moves with Post-LN (Xiong 2020)."""
    names = load("preln_postln_gain")
    before, after = names["decay"](True), names["decay"](False)
    assert 1.9 <= before <= 2.9
    assert 0.5 <= after <= 1.4
    assert before / after > 2
    theory = math.sqrt((1 + 16 * names["ADDED"]) / (1 + 2 * names["ADDED"]))
    assert before == pytest.approx(theory, rel=0.25)


@pytest.mark.parametrize(
    ("name", "options"),
    [("mean_field_gain", {"width": 50}), ("preln_postln_gain", {"depths": (2, 3), "seeds": 1})],
)
def test_the_pictures_are_drawn(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Each example writes its picture."""
    load(name)["main"](tmp_path / "picture.png", **options)
    assert (tmp_path / "picture.png").stat().st_size > 10_000
