"""Entropies of policies, held to their golden values and to sampling."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.analyzers.rl_policy.entropy import (
    categorical_entropy,
    effective_range,
    log_probabilities,
    mann_kendall,
    marginal_entropy,
    normal_entropy,
    tanh_normal_entropy,
    theil_sen,
)


def share(logits: torch.Tensor, mask: torch.Tensor | None = None) -> float:
    """Return the normalised entropy of one state."""
    entropy, largest = categorical_entropy(log_probabilities(logits, mask))
    return float(entropy / largest)


def test_entropy_of_known_categoricals() -> None:
    """Golden P1: uniform over five, uniform over the three of seven that are allowed, and (0.5, 0.25, 0.25)."""
    allowed = torch.tensor([True, False, True, False, False, True, False])
    assert share(torch.zeros(5)) == pytest.approx(1, abs=1e-6)
    assert share(torch.zeros(7), allowed) == pytest.approx(1, abs=1e-6)
    assert share(torch.tensor([0.5, 0.25, 0.25]).log()) == pytest.approx(0.946395, abs=1e-6)


def test_entropy_of_a_standard_gaussian() -> None:
    """Golden P1: a standard Gaussian has 1.418939 nats."""
    assert float(normal_entropy(torch.tensor(1.0))) == pytest.approx(1.418939, abs=1e-6)


def test_tanh_of_a_gaussian_is_most_random_in_between() -> None:
    """Golden P2: the entropy is largest at sigma 0.870, where it is 0.6836, below ln 2."""
    std = torch.linspace(0.5, 1.5, 1001)
    entropy = tanh_normal_entropy(torch.zeros(()), std)
    assert float(std[entropy.argmax()]) == pytest.approx(0.870, abs=1e-2)
    assert float(entropy.max()) == pytest.approx(0.6836, abs=1e-2)
    assert float(entropy.max()) < math.log(2)


@pytest.mark.parametrize(("std", "expected"), [(0.1, -0.894), (2.0, -0.001), (5.0, -3.69)])
def test_tanh_entropy_falls_on_both_sides(std: float, expected: float) -> None:
    """A narrow Gaussian is certain, and a wide one piles up at both ends."""
    assert float(tanh_normal_entropy(torch.zeros(()), torch.tensor(std))) == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.5), (0.7, 0.9), (-1.5, 0.4)])
def test_tanh_entropy_agrees_with_sampling(mean: float, std: float) -> None:
    """Golden P2: quadrature and a million samples agree to 5e-3."""
    noise = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    latent = mean + std * noise
    slope = 2 * (math.log(2) - latent - torch.nn.functional.softplus(-2 * latent))
    sampled = 0.5 * math.log(2 * math.pi * math.e * std**2) + float(slope.mean())
    found = float(tanh_normal_entropy(torch.tensor(mean), torch.tensor(std)))
    assert found == pytest.approx(sampled, abs=5e-3)


@given(st.integers(2, 9), st.integers(0, 2**31))
def test_conditional_entropy_is_never_above_the_marginal(actions: int, seed: int) -> None:
    """What the state tells about the action is not negative."""
    logits = 3 * torch.randn(20, actions, generator=torch.Generator().manual_seed(seed))
    log_probs = log_probabilities(logits)
    assert float(categorical_entropy(log_probs)[0].mean()) <= float(marginal_entropy(log_probs)[0]) + 1e-12


def test_effective_range_is_a_share() -> None:
    """A Gaussian covers its range in proportion to sigma, and never more than all of it."""
    assert float(effective_range(torch.tensor(0.1), 2.0)) == pytest.approx(0.1 * math.sqrt(2 * math.pi * math.e) / 2)
    assert float(effective_range(torch.tensor(9.0), 2.0)) == 1


def test_theil_sen_ignores_an_outlier() -> None:
    """One wild value out of eleven does not bend the slope."""
    values = [float(index) for index in range(11)]
    values[5] = 1e6
    assert theil_sen(values) == pytest.approx(1.0, abs=0.2)
    assert theil_sen([1.0]) == 0


def test_mann_kendall_equals_scipy() -> None:
    """The sum of signs and its chance agree with scipy's Kendall tau on values without ties."""
    scipy = pytest.importorskip("scipy.stats")
    generator = torch.Generator().manual_seed(3)
    values = (torch.arange(40) * 0.03 + torch.randn(40, generator=generator)).tolist()
    total, chance = mann_kendall(values)
    found = scipy.kendalltau(range(40), values, method="asymptotic")
    assert total == pytest.approx(found.statistic * 40 * 39 / 2)
    assert chance == pytest.approx(found.pvalue, abs=0.01)


def test_a_constant_series_has_no_trend() -> None:
    """Ties everywhere are no evidence."""
    assert mann_kendall([2.0] * 20) == (0.0, 1.0)
