"""The verdict on histories and depth profiles: its laws first, then its cases."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gradtrack.errors import InputTypeError, UsageError
from gradtrack.functional import GradientVerdict, detect_gradient_issues
from gradtrack.functional.verdict import Axis, judge

axes = st.sampled_from(["time", "depth"])
histories = st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1e12)), max_size=40)
OPPOSITE = {"vanishing": "exploding", "exploding": "vanishing", "stable": "stable"}


def status(history: object, axis: Axis | None = None) -> str:
    """Return the word alone."""
    return detect_gradient_issues(history, axis=axis).status


@given(histories, st.integers(-400, 400), axes)
def test_a_constant_factor_changes_no_verdict(history: list[float], exponent: int, axis: Axis) -> None:
    """The scale of the loss is no property of the gradient flow."""
    scaled = [math.ldexp(norm, exponent) for norm in history]
    assert status(scaled, axis) == status(history, axis)


@given(st.lists(st.floats(1e-12, 1e12), max_size=40))
def test_time_backwards_turns_the_verdict(history: list[float]) -> None:
    """What shrinks one way grows the other way."""
    assert status(history[::-1], "time") == OPPOSITE[status(history, "time")]


@given(histories)
def test_depth_follows_the_gradient_from_the_last_entry_to_the_first(history: list[float]) -> None:
    """But for its wider limit, a profile is a history read from the output to the input."""
    depth, time = detect_gradient_issues(history, axis="depth"), detect_gradient_issues(history[::-1])
    assert depth.status in (time.status, "stable")
    assert depth.norms == tuple(history)


@given(st.lists(st.floats(1 / 3, 3.0), max_size=60), axes)
def test_noise_around_a_constant_is_stable(history: list[float], axis: Axis) -> None:
    """A factor of three either way is no finding at any length."""
    assert status(history, axis) == "stable"


@given(st.lists(st.floats(0.5, 2.0), min_size=6, max_size=60), st.data())
def test_one_outlier_in_a_long_history_is_stable(history: list[float], data: st.DataObject) -> None:
    """One entry may be anything finite, zero too, at any place."""
    place = data.draw(st.integers(0, len(history) - 1))
    history[place] = data.draw(st.sampled_from([0.0, 1e-300, 1e-9, 1e9, 1e300]))
    assert status(history) == "stable"


@given(st.integers(2, 400), st.floats(1.0, 200.0), st.booleans(), axes)
def test_a_steady_change_is_found_at_any_length(count: int, decades: float, grows: bool, axis: Axis) -> None:
    """A geometric series is judged by its total change: 1000, or 100 in a few steps over time."""
    total = decades if grows else -decades
    travelled = np.logspace(0.0, total, count)
    series = travelled if axis == "time" else travelled[::-1]
    limit = 2.0 if axis == "time" and count < 10 else 3.0
    assume(abs(decades - limit) > 1e-6)
    verdict = detect_gradient_issues(series, axis=axis)
    assert verdict.status == ("stable" if decades < limit else "exploding" if grows else "vanishing")
    assert verdict.slope == pytest.approx(total * math.log(10.0) / (count - 1))


@given(st.lists(st.floats(1e-3, 1e3), max_size=20), st.sampled_from([math.nan, math.inf]), st.data())
def test_any_non_finite_norm_is_exploding(history: list[float], bad: float, data: st.DataObject) -> None:
    """A norm that is not a number is the end of growth, and the message counts it."""
    history.insert(data.draw(st.integers(0, len(history))), bad)
    verdict = detect_gradient_issues(history)
    assert verdict.status == "exploding"
    assert verdict.message == f"1 of {len(history)} gradient norms are NaN or infinite."


@given(st.integers(1, 30), axes)
def test_nothing_but_zeros_is_vanishing(count: int, axis: Axis) -> None:
    """Gradients that are all zero have vanished."""
    verdict = detect_gradient_issues([0.0] * count, axis=axis)
    assert verdict.status == "vanishing"
    assert "zero at the end" in verdict.message


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([], "stable"),
        ([3.0], "stable"),
        ([None, 2.0], "stable"),
        ([1.0, 1e-4], "vanishing"),
        ([1, 10, 100, 1000], "exploding"),
        ([1, 2, 5, 10, 20, 50, 100], "exploding"),
        ([1.0] * 100 + [1e-5] * 20, "vanishing"),
        ([1.0] * 100 + [1e1, 1e2, 1e3, 1e4, 1e5], "exploding"),
        ([1.0, 10.0, 50.0, 120.0] + [160.0] * 36, "stable"),
        ([1.0] * 20 + [0.0] * 5, "vanishing"),
        ([0.0] * 3 + [1.0] * 10, "stable"),
        ([1.0, 1e-3] * 50, "stable"),
        ([1.0, 0.9, 1.1, 1.0, 0.95], "stable"),
    ],
)
def test_typical_histories(history: list[float | None], expected: str) -> None:
    """Onsets, plateaus, zeros, oscillations and short histories each get the word one expects."""
    assert status(history) == expected


def test_heavy_noise_is_stable() -> None:
    """Noise with a standard deviation of a factor of four raises no alarm in a hundred histories."""
    rng = np.random.default_rng(0)
    assert {status(np.exp(1.4 * rng.standard_normal(200))) for _ in range(100)} == {"stable"}


def test_short_noise_of_orders_of_magnitude_hardly_ever_alarms() -> None:
    """Twelve entries that scatter by a factor of twenty look like a trend in less than three of a hundred."""
    rng = np.random.default_rng(0)
    statuses = [status(np.exp(3.0 * rng.standard_normal(12))) for _ in range(300)]
    assert len(statuses) - statuses.count("stable") < 9


def test_a_history_of_a_hundred_thousand_steps_is_judged() -> None:
    """The slopes of all pairs would be five billion; their number is bounded."""
    slow = np.logspace(0.0, -3.5, 100_000)
    assert judge(tuple(slow), "time").status == "vanishing"
    assert judge(tuple(np.tile([1.0, 2.0], 50_000)), "time").status == "stable"


def test_a_ratio_beyond_the_range_is_neither_zero_nor_infinite() -> None:
    """From 1e308 to 1e-308 the norm shrinks, but it is not zero."""
    verdict = detect_gradient_issues([1e308, 1e-308])
    assert 0.0 < verdict.ratio < 1e-300
    assert "shrinks" in verdict.message


def test_direction_over_depth() -> None:
    """Shrinking towards the input vanishes, shrinking towards the output explodes on the way back."""
    towards_input = {f"layer_{index}": 10.0 ** (index - 7) for index in range(7)}
    towards_output = dict(zip(towards_input, reversed(towards_input.values()), strict=True))
    assert detect_gradient_issues(towards_input).axis == "depth"
    assert (status(towards_input), status(towards_output)) == ("vanishing", "exploding")
    assert (status(towards_input, "time"), status(list(towards_input.values()), "depth")) == (
        "exploding",
        "vanishing",
    )


def test_entries_may_be_any_nesting() -> None:
    """A step may hold arrays, tensors or a dict of both; the rows of an array are its steps."""
    steps = [{"w": np.full(4, 10.0**-step), "b": [torch.zeros(2), None]} for step in range(5)]
    assert detect_gradient_issues(steps).norms == pytest.approx([2.0, 0.2, 0.02, 0.002, 0.0002])
    assert status(steps) == status(np.logspace(0, -5, 6)) == status(torch.logspace(0, -5, 6)) == "vanishing"
    assert detect_gradient_issues(np.full((3, 4), 2.0)).norms == (4.0, 4.0, 4.0)


def test_the_result_reads_like_a_dict_and_like_an_object() -> None:
    """Keys, get and attributes agree, and nothing can be assigned."""
    verdict = detect_gradient_issues([1.0, 0.1, 0.01, 0.001])
    assert isinstance(verdict, GradientVerdict)
    assert list(verdict.keys()) == ["status", "axis", "norms", "ratio", "slope", "message"]
    assert verdict["status"] == verdict.get("status") == verdict.status == "vanishing"
    assert dict(verdict)["ratio"] == verdict.ratio == pytest.approx(1e-3)
    assert verdict.message == "The gradient norm shrinks over time (4 entries, factor 0.001)."
    assert str(verdict) == f"vanishing: {verdict.message}"
    with pytest.raises(KeyError, match="expected one of status, axis"):
        verdict["state"]
    with pytest.raises(FrozenInstanceError):
        verdict.status = "stable"  # type: ignore[misc]


def test_wrong_arguments_are_errors() -> None:
    """A single number has no history, and there are two axes."""
    for lonely in (3.0, np.array(3.0), torch.tensor(3.0), "vanishing", None):
        with pytest.raises(InputTypeError, match=r"expected several\. Pass a list or a dict"):
            detect_gradient_issues(lonely)
    with pytest.raises(UsageError, match="axis='layers': expected 'time' or 'depth'"):
        detect_gradient_issues([1.0], axis="layers")  # type: ignore[arg-type]
