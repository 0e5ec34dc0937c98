"""What the state tells about the action, against sums over everything that can happen."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradtrack.analyzers.rl_policy import entropy
from gradtrack.analyzers.rl_policy.entropy import choice_information, gaussian_information


def tables(seed: int, states: int, *widths: int, sharpness: float = 2.0) -> list[Tensor]:
    """Draw log-probabilities of choices."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (sharpness * torch.randn(states, width, generator=generator, dtype=torch.float64)).log_softmax(-1)
        for width in widths
    ]


def summed(choices: list[Tensor]) -> float:
    """Sum p(s) p(a|s) ln p(a|s)/p(a) over every state and joint action."""
    probs = [one.exp().numpy() for one in choices]
    states, total = len(probs[0]), 0.0
    for actions in itertools.product(*(range(one.shape[1]) for one in probs)):
        given_state = np.prod([one[:, action] for one, action in zip(probs, actions, strict=True)], axis=0)
        total += float((given_state * np.log(given_state / given_state.mean())).sum()) / states
    return total


@given(st.integers(0, 2**31), st.integers(1, 6), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_choices_are_summed_over_joint_actions(seed: int, states: int, widths: list[int]) -> None:
    """It is the mutual information of state and joint action."""
    choices = tables(seed, states, *widths)
    assert float(choice_information(choices)) == pytest.approx(summed(choices), abs=1e-9)


def test_two_choices_that_tell_the_same_count_once() -> None:
    """Of four states, of which both choices tell which it is, the action tells ln 4 and not twice that."""
    sure = torch.full((4, 4), -60.0, dtype=torch.float64).fill_diagonal_(0.0).log_softmax(-1)
    assert float(choice_information([sure, sure])) == pytest.approx(math.log(4), abs=1e-9)


def test_many_choices_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what can be listed the drawn actions give nearly the same, without a trace in torch's generator."""
    choices = tables(1, 100, 3, 4, 2)
    exact, before = float(choice_information(choices)), torch.get_rng_state()
    monkeypatch.setattr(entropy, "_CELLS", 1)
    assert float(choice_information(choices)) == pytest.approx(exact, abs=0.05)
    assert torch.equal(before, torch.get_rng_state())


def test_a_state_without_an_action_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is allowed nothing is told, listed or sampled."""
    choices = tables(2, 50, 3, 4)
    barred = [torch.cat([one, torch.full((1, one.shape[1]), -math.inf, dtype=torch.float64)]) for one in choices]
    assert float(choice_information(barred)) == pytest.approx(float(choice_information(choices)), abs=1e-12)
    monkeypatch.setattr(entropy, "_CELLS", 1)
    assert float(choice_information(barred)) == pytest.approx(summed(choices), abs=0.15)


@settings(max_examples=20)
@given(st.floats(0.05, 3.0), st.floats(0.0, 6.0))
def test_one_dimension_is_an_integral(std: float, distance: float) -> None:
    """Of two Gaussians it is the integral of each density times its logarithm over that of their mean."""
    means = np.array([-distance, distance])
    grid = np.linspace(-distance - 12 * std, distance + 12 * std, 40_001)
    densities = np.exp(-(((grid - means[:, None]) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))
    logs = np.log(np.maximum(densities, 1e-300)) - np.log(np.maximum(densities.mean(0), 1e-300))
    expected = float(np.trapezoid(densities * logs, grid, axis=1).mean())
    found = gaussian_information(torch.tensor(means).reshape(2, 1), torch.full((2, 1), std))
    assert float(found) == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize("width", [1, 2, 7])
def test_gaussians_tell_at_most_which_state_it_is(width: int) -> None:
    """Narrow ones tell all, ln of the number of states, in any number of dimensions, and equal ones nothing."""
    apart = torch.arange(9.0).reshape(9, 1).expand(9, width)
    assert float(gaussian_information(apart, torch.full((9, width), 1e-3))) == pytest.approx(math.log(9))
    assert float(gaussian_information(torch.zeros(9, width), torch.ones(9, width))) == pytest.approx(0, abs=1e-12)


def test_no_state_tells_nothing() -> None:
    """An empty batch has no information, and that is not zero."""
    assert math.isnan(float(gaussian_information(torch.zeros(0, 2), torch.ones(0, 2))))
