"""What policy updates are judged by."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from gradtrack.analyzers.rl_policy.update_metrics import (
    clip_fraction,
    dormant_share,
    explained_variance,
    head_gradient_ratio,
    kl_estimates,
    trunk_gradient_ratio,
)
from gradtrack.errors import InputTypeError


def test_divergence_of_two_gaussians() -> None:
    """Golden P3: k3 of N(0,1) to N(0.3,1.2) is 0.06079, the exact divergence."""
    old, new = Normal(torch.zeros((), dtype=torch.float64), 1.0), Normal(torch.tensor(0.3, dtype=torch.float64), 1.2)
    actions = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_ratio = new.log_prob(actions) - old.log_prob(actions)  # type: ignore[no-untyped-call]
    found = kl_estimates(log_ratio)
    assert found.k3 == pytest.approx(0.06079, abs=3e-3)
    assert float(kl_divergence(old, new)) == pytest.approx(0.06079, abs=1e-5)
    assert found.k1 == pytest.approx(found.k3, abs=3e-3)


def test_the_dormant_share_is_that_of_one_layer() -> None:
    """Several layers at once are refused, with what to do."""
    layer = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    assert dormant_share(layer) == dormant_share(layer.T, axis=0) == 0.25
    with pytest.raises(InputTypeError, match=r"activations list: expected the tensor .* once for each layer"):
        dormant_share([layer, layer])  # type: ignore[arg-type]


def test_equal_policies_do_not_diverge() -> None:
    """With equal probabilities every estimate is 0 and nothing is clipped."""
    assert kl_estimates(torch.zeros(9)) == (0, 0, 0)
    assert clip_fraction(torch.zeros(9)) == 0


def test_clip_fraction_counts_ratios_outside() -> None:
    """Ratios of 1.3 and 0.7 are outside of a range of 0.2, 1.1 is not."""
    assert clip_fraction(torch.tensor([1.3, 0.7, 1.1, 1.0]).log()) == 0.5


def test_explained_variance_of_known_critics() -> None:
    """A perfect critic explains everything, a constant one nothing, and constant returns cannot be explained."""
    returns = torch.arange(10.0)
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((10,), 3.0), returns) == pytest.approx(0)
    assert math.isnan(explained_variance(returns, torch.ones(10)))


def test_of_nothing_nothing_is_known() -> None:
    """Without an action or a state each number is NaN, and no warning."""
    nothing = torch.zeros(0)
    assert all(map(math.isnan, (*kl_estimates(nothing), clip_fraction(nothing), explained_variance(nothing, nothing))))


def test_gradient_ratio_on_the_trunk() -> None:
    """A loss three times as steep on the shared layer gives a ratio of 3, and the graphs are kept."""
    trunk = nn.Linear(4, 4)
    hidden = trunk(torch.ones(2, 4)).sum()
    assert trunk_gradient_ratio(3 * hidden, hidden, trunk.parameters()) == pytest.approx(3)
    torch.autograd.backward(hidden)


def test_gradient_ratio_by_names() -> None:
    """Actor and critic are told apart by their names; with one side only there is no ratio."""
    norms = {"policy_net.0.weight": 3.0, "action_net.weight": 4.0, "value_net.weight": 2.0, "features.weight": 9.0}
    assert head_gradient_ratio(norms) == pytest.approx(2.5)
    assert head_gradient_ratio({"features.weight": 1.0}) is None


def test_dormant_units_are_small_against_their_layer() -> None:
    """Units at 1 % of the layer's mean are dormant whatever the scale of the layer."""
    sizes = torch.tensor([1.0, 1.0, 0.0, 0.01])
    for scale in (1e-6, 1.0, 1e6):
        assert dormant_share(scale * sizes.expand(5, 4)) == 0.5
