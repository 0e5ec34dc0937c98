"""The analyzer of policies: every kind of action, the judgement by returns, and Stable-Baselines3's own numbers."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch import distributions as td

from gradtrack import GradientManager, IssueType, RLPolicyAnalyzer
from gradtrack.analyzers.rl_policy.report import PolicyReport
from gradtrack.errors import InputTypeError, UsageError


def observed(distribution: Any, **options: Any) -> PolicyReport:
    """Return the report on one observation."""
    analyzer = RLPolicyAnalyzer()
    analyzer.observe(distribution, **options)
    return analyzer.report()


def types(report: PolicyReport) -> set[IssueType]:
    """Return the types of a report's issues."""
    return {issue.issue_type for issue in report.issues}


class ActorCritic(nn.Module):
    """A policy over four actions and a critic on a shared trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.actor, self.critic = nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and values."""
        hidden = self.trunk(states)
        return self.actor(hidden), self.critic(hidden)


def states(step: int = 0) -> Tensor:
    """Return a batch of states that depends on the step only."""
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(step))


def both_losses(output: tuple[Tensor, Tensor]) -> Tensor:
    """Return a loss that both heads matter for."""
    return output[0].log_softmax(-1)[:, 0].mean() + output[1].square().mean()


def extractor(output: tuple[Tensor, Tensor]) -> tuple[Tensor, None, None, Tensor]:
    """Take (logits, std, mean, value) from the policy."""
    return output[0], None, None, output[1]


MASK = torch.tensor([True, False, True, False, False, True, False])
UNIFORM: dict[str, tuple[Any, dict[str, Any], float]] = {
    "categorical": (td.Categorical(logits=torch.zeros(6, 5)), {}, math.log(5)),
    "raw logits": (torch.zeros(6, 5), {}, math.log(5)),
    "one-hot": (td.OneHotCategorical(logits=torch.zeros(6, 4)), {}, math.log(4)),
    "masked": (torch.randn(1, 7).expand(6, 7) * 0, {"mask": MASK}, math.log(3)),
    "masked by state": (torch.zeros(2, 7), {"mask": torch.stack([MASK, ~MASK])}, (math.log(3) + math.log(4)) / 2),
    "multi-discrete": ([torch.zeros(6, 3), torch.zeros(6, 5)], {}, math.log(15)),
    "joint mask": ([torch.zeros(6, 3), torch.zeros(6, 4)], {"mask": torch.ones(7, dtype=torch.bool)}, math.log(12)),
    "bernoulli": (td.Bernoulli(logits=torch.zeros(6, 3)), {}, 3 * math.log(2)),
    "independent": (td.Independent(td.Categorical(logits=torch.zeros(6, 2, 4)), 1), {}, 2 * math.log(4)),
    "sequence": (td.Categorical(logits=torch.zeros(3, 6, 5)), {}, math.log(5)),
}


@pytest.mark.parametrize("kind", UNIFORM)
def test_uniform_actions_have_all_of_their_entropy(kind: str) -> None:
    """Golden P1: a uniform policy of any discrete kind has normalised entropy 1, and ln of its actions in nats."""
    distribution, options, nats = UNIFORM[kind]
    report = observed(distribution, **options)
    assert report.discrete_entropy_normalized == pytest.approx(1, abs=1e-6)
    assert report.discrete_entropy_min == pytest.approx(1, abs=1e-6)
    assert report.discrete_entropy_mean == pytest.approx(nats, abs=1e-6)
    assert report.entropy_collapse_risk == "LOW"
    assert report.exploration_adequacy == "ADEQUATE"
    assert report.issues == []


def test_a_known_categorical() -> None:
    """Golden P1: (0.5, 0.25, 0.25) has normalised entropy 0.946395."""
    report = observed(td.Categorical(probs=torch.tensor([[0.5, 0.25, 0.25]])))
    assert report.discrete_entropy_normalized == pytest.approx(0.946395, abs=1e-6)


def test_a_standard_gaussian() -> None:
    """Golden P1: N(0,1) has 1.418939 nats per dimension, and no share of anything without a range."""
    report = observed(td.Normal(torch.zeros(5, 2), torch.ones(5, 2)))
    assert report.continuous_entropy_mean == pytest.approx(2 * 1.4189385, abs=1e-6)
    assert report.continuous_std_mean == 1
    assert report.continuous_entropy_normalized is None


def test_a_gaussian_in_its_range() -> None:
    """With a range, a Gaussian's share of it is sigma sqrt(2 pi e)/width, and its std is told against half of it."""
    report = observed((torch.zeros(5, 2), torch.tensor([0.1, 0.4])), action_range=(-2.0, 2.0))
    shares = [std * math.sqrt(2 * math.pi * math.e) / 4 for std in (0.1, 0.4)]
    assert report.continuous_entropy_normalized == pytest.approx(sum(shares) / 2)
    assert report.continuous_range_min == pytest.approx(shares[0])
    assert report.continuous_relative_std_mean == pytest.approx(0.125)


def tanh(std: float, scale: float | None = None) -> td.Distribution:
    """Return tanh of a Gaussian, scaled afterwards or not."""
    base = td.Independent(td.Normal(torch.zeros(4, 2), torch.full((4, 2), std)), 1)
    further = [] if scale is None else [td.AffineTransform(torch.zeros(2), torch.full((2,), scale), event_dim=1)]
    return td.TransformedDistribution(base, [td.TanhTransform(), *further])


@pytest.mark.parametrize(("std", "nats"), [(0.1, -0.894), (0.87, 0.6836), (5.0, -3.69)])
def test_tanh_gaussians(std: float, nats: float) -> None:
    """Golden P2: entropy per dimension, and its share exp(h)/2, which a scale after tanh does not change."""
    report, scaled = observed(tanh(std)), observed(tanh(std, 3.0))
    assert report.continuous_entropy_mean == pytest.approx(2 * nats, abs=1e-2)
    assert report.continuous_entropy_normalized == pytest.approx(math.exp(nats) / 2, abs=5e-3)
    assert scaled.continuous_entropy_normalized == pytest.approx(report.continuous_entropy_normalized)
    assert report.continuous_entropy_mean is not None
    assert scaled.continuous_entropy_mean == pytest.approx(report.continuous_entropy_mean + 2 * math.log(3))


def test_a_wide_tanh_gaussian_has_collapsed() -> None:
    """A large sigma before tanh puts the actions at both ends: that is collapse, not exploration."""
    report = observed(tanh(30.0))
    assert report.entropy_collapse_risk == "HIGH"
    assert IssueType.ENTROPY_COLLAPSE in types(report)
    assert IssueType.OVER_EXPLORATION not in types(report)


@pytest.mark.parametrize(
    "distribution",
    [
        td.Beta(torch.full((4, 2), 2.0), torch.full((4, 2), 3.0)),
        td.Uniform(torch.zeros(4, 2), torch.full((4, 2), 2.0)),
        td.MultivariateNormal(torch.zeros(4, 3), torch.eye(3) * 0.5),
        td.Laplace(torch.zeros(4, 2), torch.ones(4, 2)),
        td.Categorical(logits=torch.randn(4, 3)),
        td.Independent(td.Bernoulli(logits=torch.randn(4, 3)), 1),
        td.Independent(td.Normal(torch.randn(4, 3), torch.rand(4, 3) + 0.1), 1),
        td.LogNormal(torch.zeros(4, 2), torch.ones(4, 2)),
    ],
    ids=lambda found: type(found).__name__,
)
def test_nats_equal_torch_for_any_distribution(distribution: td.Distribution) -> None:
    """The entropy of any distribution is the one that torch has a formula for, summed over the action."""
    report = observed(distribution)
    state = torch.get_rng_state()
    try:
        expected = distribution.entropy()
    except NotImplementedError:
        expected = 0.5 + 0.5 * torch.full((4, 2), 2 * math.pi).log()  # log-normal of location 0 and scale 1
    expected = expected.sum(-1) if expected.ndim > 1 else expected
    found = report.discrete_entropy_mean if report.discrete_entropy_mean is not None else report.continuous_entropy_mean
    tolerance = 0.5 if isinstance(distribution, td.LogNormal) else 1e-5
    assert found == pytest.approx(float(expected.mean()), abs=tolerance)
    assert torch.equal(torch.get_rng_state(), state)


@given(st.integers(2, 8), st.integers(1, 20), st.integers(0, 2**31))
def test_masking_an_action_is_leaving_it_out(actions: int, count: int, seed: int) -> None:
    """A masked action and one that is not there give the same report."""
    logits = 2 * torch.randn(count, actions, generator=torch.Generator().manual_seed(seed))
    wider = torch.cat([logits, torch.randn(count, 1)], dim=-1)
    mask = torch.arange(actions + 1) < actions
    found, expected = observed(wider, mask=mask), observed(logits)
    assert found.discrete_entropy_mean == pytest.approx(expected.discrete_entropy_mean, abs=1e-9)
    assert found.marginal_entropy_normalized == pytest.approx(expected.marginal_entropy_normalized, abs=1e-9)


@pytest.mark.parametrize("low", [-math.inf, -1e6, -1e8, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("wrap", [lambda logits: logits, lambda logits: td.Categorical(logits=logits)])
def test_a_number_that_stands_for_forbidden_is_a_mask(low: float, wrap: Any) -> None:
    """P1: three of seven actions allowed alike have all of their entropy, whatever the other logits are set to."""
    report = observed(wrap(torch.zeros(4, 7).index_fill(1, torch.arange(3, 7), low)))
    assert report.discrete_entropy_normalized == pytest.approx(1)
    assert report.marginal_entropy_normalized == pytest.approx(1)


def test_the_lowest_number_of_half_precision_is_a_mask() -> None:
    """float16 ends at -65504."""
    low = torch.finfo(torch.float16).min
    logits = torch.zeros(4, 7, dtype=torch.float16).index_fill(1, torch.arange(3, 7), low)
    assert observed(logits).discrete_entropy_normalized == pytest.approx(1)


def test_a_sure_policy_is_not_a_masked_one() -> None:
    """Logits that are merely far apart are a collapse of all actions, and whole numbers are logits too."""
    report = observed(torch.tensor([[3000.0, 0, 0]]).repeat(9, 1))
    assert report.entropy_collapse_risk == "HIGH"
    assert observed(torch.tensor([[1, 1, 1]])).discrete_entropy_normalized == pytest.approx(1)


def test_a_wrapper_of_several_distributions_is_read() -> None:
    """What keeps its choices as `distributions`, as maskable ones do, is several choices."""
    wrapper = SimpleNamespace(distributions=[td.Categorical(logits=torch.zeros(4, size)) for size in (3, 5)])
    assert observed(wrapper).discrete_entropy_mean == pytest.approx(math.log(15))


def test_of_a_range_without_an_end_no_share_is_known() -> None:
    """An action space that is not bounded is judged as one of which nothing is known."""
    for std in (1.0, 1e-3):
        gaussian = (torch.zeros(3, 2), torch.full((3, 2), std))
        report = observed(gaussian, action_range=(-math.inf, math.inf))
        assert report.continuous_entropy_normalized is None
        assert report == observed(gaussian)


def test_dimensions_without_a_range_leave_the_others_theirs() -> None:
    """One that is not bounded, or in which nothing can be chosen, has no share; the rest is judged by its own."""
    low, high = torch.tensor([-1.0, -math.inf, 2.0]), torch.tensor([1.0, math.inf, 2.0])
    mean, std = torch.zeros(3, 3), torch.tensor([0.3, 1.0, 1.0]).expand(3, 3)
    report = observed((mean, std), action_range=(low, high))
    alone = observed((mean[:, :1], std[:, :1]), action_range=(-1.0, 1.0))
    assert report.continuous_entropy_normalized == alone.continuous_entropy_normalized


def test_states_with_one_action_do_not_count() -> None:
    """Where only one action is allowed there is nothing to explore, and the share is of the other states."""
    mask = torch.tensor([[True, False, False], [True, True, True]])
    report = observed(torch.zeros(2, 3), mask=mask)
    assert report.discrete_entropy_normalized == pytest.approx(1)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_masked_choices_in_every_precision(dtype: torch.dtype, scale: float) -> None:
    """Each number is that of sums over states and allowed actions in Python's floats."""
    generator = torch.Generator().manual_seed(0)
    tables = [(scale * torch.randn(7, width, generator=generator)).to(dtype) for width in (3, 5)]
    masks = [torch.rand(table.shape, generator=generator) > 0.4 for table in tables]
    for mask in masks:
        mask[:, 0] = True
    report = observed(tables, mask=masks)
    nats, largest = np.zeros((7, 2)), np.zeros((7, 2))
    for part, (table, mask) in enumerate(zip(tables, masks, strict=True)):
        for state in range(7):
            logits = table[state][mask[state]].double().numpy()
            probs = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            nats[state, part] = -sum(p * math.log(p) for p in probs if p > 0)
            largest[state, part] = math.log(len(probs))
    possible = largest.sum(1) > 0
    shares = [float((nats[known, part] / largest[known, part]).mean()) for part, known in enumerate((largest > 0).T)]
    assert report.discrete_entropy_mean == pytest.approx(nats.sum(1).mean(), abs=1e-9)
    expected = (nats.sum(1)[possible] / largest.sum(1)[possible]).mean()
    assert report.discrete_entropy_normalized == pytest.approx(expected, abs=1e-9)
    assert report.discrete_entropy_min == pytest.approx(min(shares), abs=1e-9)


def test_a_state_without_an_allowed_action_counts_for_nothing() -> None:
    """A state whose mask forbids everything changes no number, for one choice and for several."""
    logits, mask = torch.randn(6, 5), torch.ones(6, 5, dtype=torch.bool)
    mask[4] = False
    others = torch.arange(6) != 4
    for inputs, masks in ((logits, mask), ([logits[:, :2], logits[:, 2:]], [mask[:, :2], mask[:, 2:]])):
        found = observed(inputs, mask=masks)
        rest = observed([one[others] for one in inputs] if isinstance(inputs, list) else inputs[others])
        assert found.num_states == 5
        assert found.metrics() == pytest.approx(rest.metrics())


def test_several_dimensions_tell_what_they_tell_together() -> None:
    """Dimensions that all tell the same say which of the states it is, and no more than that."""
    means = torch.arange(5.0).reshape(5, 1).expand(5, 6)
    report = observed(td.Independent(td.Normal(means, 1e-3), 1))
    assert report.state_information == pytest.approx(math.log(5))
    assert report.marginal_entropy == pytest.approx((report.conditional_entropy or 0) + math.log(5))
    squashed = td.TransformedDistribution(td.Normal(means / 9, 1e-3), [td.TanhTransform()])
    assert observed(td.Independent(squashed, 1)).state_information == pytest.approx(math.log(5))


@pytest.mark.parametrize("empty", [torch.zeros(0, 4), (torch.zeros(0, 2), torch.ones(0, 2))])
def test_an_observation_of_no_state_has_no_numbers(empty: Any) -> None:
    """An empty batch is no fault and says nothing."""
    assert observed(empty).metrics() == {"rl/num_observations": 1.0, "rl/num_states": 0.0}


def test_what_the_state_tells_about_the_action() -> None:
    """A policy that is certain in every state and differs between them has all of its information from the state."""
    report = observed(1000 * torch.eye(4).repeat(5, 1))
    assert report.conditional_entropy == pytest.approx(0, abs=1e-9)
    assert report.marginal_entropy == pytest.approx(math.log(4))
    assert report.state_information == pytest.approx(math.log(4))
    assert report.confidence == "low"
    assert report.entropy_collapse_risk == "MEDIUM"
    assert [issue.severity.value for issue in report.issues] == ["LOW"]


def test_a_certain_policy_has_collapsed() -> None:
    """The same action everywhere is a high risk, explained once."""
    report = observed(torch.tensor([[50.0, 0, 0]]).repeat(9, 1))
    assert report.entropy_collapse_risk == "HIGH"
    assert report.exploration_adequacy == "TOO_LOW"
    collapse, little = report.issues
    assert (collapse.issue_type, collapse.severity.value) == (IssueType.ENTROPY_COLLAPSE, "HIGH")
    assert little.issue_type is IssueType.INSUFFICIENT_EXPLORATION
    assert little.explained_by == "ENTROPY_COLLAPSE"
    assert collapse.confidence == 0.5


def bandit(best: float, steps: int = 300) -> tuple[RLPolicyAnalyzer, PolicyReport]:
    """Train a three-armed bandit by policy gradient, paid `best` for the first arm and nothing for the others."""
    analyzer = RLPolicyAnalyzer()
    logits = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(steps):
        policy = td.Categorical(logits=logits.expand(64, 3))
        actions = policy.sample()  # type: ignore[no-untyped-call]
        paid = best * (actions == 0).double()
        analyzer.observe(policy, episode_return=float(paid.mean()))
        optimizer.zero_grad()
        torch.autograd.backward(-(policy.log_prob(actions) * (paid - paid.mean())).mean())  # type: ignore[no-untyped-call]
        optimizer.step()
    return analyzer, analyzer.report()


def test_a_solved_bandit_is_healthy() -> None:
    """A deterministic policy that earns all there is has no issue, whatever the scale of its rewards."""
    for best in (1.0, 1e4):
        _, report = bandit(best)
        assert report.confidence == "high"
        assert report.entropy_collapse_risk == "LOW"
        assert report.issues == []
        assert report.exploration_adequacy == "ADEQUATE"


def test_a_policy_that_falls_for_the_wrong_arm_has_collapsed() -> None:
    """A policy that became certain while its returns went nowhere is a high issue, with high confidence."""
    analyzer = RLPolicyAnalyzer()
    for step in range(60):
        sharp = min(step, 30) * 0.4
        noise = float(np.random.default_rng(step).normal())
        analyzer.observe(torch.tensor([[sharp, 0.0, 0.0]]).repeat(16, 1), episode_return=noise)
    report = analyzer.report()
    assert report.confidence == "high"
    assert report.entropy_collapse_risk == "HIGH"
    assert types(report) == {IssueType.ENTROPY_COLLAPSE, IssueType.INSUFFICIENT_EXPLORATION}
    assert all(issue.confidence == 0.9 for issue in report.issues)


@pytest.mark.parametrize("sure", [True, False])
def test_a_policy_that_does_the_same_everywhere_has_not_come_trained(sure: bool) -> None:
    """Certain from the first at returns that stand still: a collapse, unless what it is certain of is the state's."""
    logits = 40 * (torch.eye(4).repeat(4, 1) if sure else torch.eye(4)[:1].repeat(16, 1))
    gaussian = (torch.arange(16.0)[:, None] if sure else torch.zeros(16, 1), torch.full((16, 1), 0.01))
    for distribution in (logits, gaussian):
        analyzer = RLPolicyAnalyzer()
        for _ in range(60):
            analyzer.observe(distribution, episode_return=1.0)
            report = analyzer.report()
        assert report.entropy_collapse_risk == ("LOW" if sure else "HIGH")
        assert (IssueType.ENTROPY_COLLAPSE in types(report)) is not sure


def test_the_worst_part_of_a_mixed_action_is_judged() -> None:
    """A continuous part without a range has collapsed, however random the discrete one beside it is."""
    report = observed([td.Categorical(logits=torch.zeros(8, 3)), td.Normal(torch.zeros(8, 2), 0.01)])
    assert report.discrete_entropy_normalized == pytest.approx(1)
    assert report.entropy_level == pytest.approx(0.01)
    assert report.entropy_collapse_risk == "HIGH"


def test_std_thresholds() -> None:
    """A tiny and a huge deviation are issues: low ones by the usual values, medium ones by chosen values."""
    tiny, huge = (torch.zeros(8, 2), torch.full((2,), 0.05)), (torch.zeros(8, 2), torch.full((2,), 3.0))
    for pair, kind in ((tiny, IssueType.LOW_ACTION_STD), (huge, IssueType.OVER_EXPLORATION)):
        usual = next(issue for issue in observed(pair, action_range=(-1, 1)).issues if issue.issue_type is kind)
        assert usual.severity.value == "LOW"
        analyzer = RLPolicyAnalyzer(min_std_threshold=0.1, max_std_threshold=2.0)
        analyzer.observe(pair, action_range=(-1, 1))
        chosen = next(issue for issue in analyzer.report().issues if issue.issue_type is kind)
        assert chosen.severity.value == "MEDIUM"


def test_a_chosen_entropy_threshold_judges() -> None:
    """Entropy between collapse and a chosen threshold is insufficient exploration."""
    logits = torch.tensor([[2.5, 0.0, 0.0]]).repeat(8, 1)
    assert observed(logits).issues == []
    analyzer = RLPolicyAnalyzer(min_entropy_threshold=0.7)
    analyzer.observe(logits)
    assert types(analyzer.report()) == {IssueType.INSUFFICIENT_EXPLORATION}


def test_update_numbers_are_taken_along() -> None:
    """Divergence, clipping and the critic's fit are in the report of the observation that they came with."""
    returns = torch.arange(8.0)
    report = observed(torch.zeros(8, 2), log_ratio=torch.tensor([1.3, 1.0] * 4).log(), values=returns, returns=returns)
    assert report.clip_fraction == 0.5
    assert report.explained_variance == 1
    assert report.kl_k3 is not None
    assert report.kl_k3 > 0


def test_offline_analysis_of_an_actor_critic() -> None:
    """Offline the report has the documented attributes, units and gradient ratios, and the model stays as it was."""
    model = ActorCritic()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    issues, stats = RLPolicyAnalyzer(model).analyze(
        lambda: torch.randn(16, 6), both_losses, steps=5, action_extractor=extractor
    )
    assert issues == []
    assert stats.discrete_entropy_normalized is not None
    assert 0.9 < stats.discrete_entropy_normalized <= 1
    assert stats.entropy_collapse_risk == "LOW"
    assert stats.exploration_adequacy == "ADEQUATE"
    assert stats.num_states == 80
    assert stats.actor_critic_gradient_ratio is not None
    assert set(stats.dormant_units) == {"trunk.1"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.trunk[1]._forward_hooks


def test_offline_analysis_of_a_gaussian_policy() -> None:
    """An extractor that gives only mean and std is enough."""
    model = nn.Linear(6, 2)
    issues, stats = RLPolicyAnalyzer(model, min_std_threshold=0.1).analyze(
        states, lambda output: output.square().mean(), 3, lambda output: (None, torch.full((2,), 0.01), output, None)
    )
    assert stats.continuous_std_mean == pytest.approx(0.01)
    assert stats.discrete_entropy_normalized is None
    assert IssueType.LOW_ACTION_STD in {issue.issue_type for issue in issues}


def test_a_collapsed_policy_is_found_offline() -> None:
    """A policy that always does the same is a high entropy collapse."""
    model = ActorCritic()
    with torch.no_grad():
        model.actor.bias.copy_(torch.tensor([90.0, 0, 0, 0]))
    issues, stats = RLPolicyAnalyzer(model).analyze(states, both_losses, steps=3, action_extractor=extractor)
    assert stats.entropy_collapse_risk == "HIGH"
    assert issues[0].issue_type is IssueType.ENTROPY_COLLAPSE


def test_outputs_that_speak_for_themselves_need_no_extractor() -> None:
    """Logits need no extractor; a tuple does, and the error says how it looks."""
    model = nn.Linear(6, 3)
    assert RLPolicyAnalyzer(model).analyze(states, lambda output: output.square().mean(), steps=1)[0] == []
    with pytest.raises(UsageError, match=r"Pass action_extractor.*\(logits, std, mean, value\)"):
        RLPolicyAnalyzer(ActorCritic()).analyze(states, both_losses, steps=1)


def test_switches_turn_their_parts_on_and_off() -> None:
    """Sensitivity, coherence and distributions come and go with their switches."""
    model = ActorCritic()
    plain = RLPolicyAnalyzer(model).analyze(states, both_losses, 3, extractor)[1]
    assert plain.input_sensitivity is None
    assert plain.gradient_coherence is None
    full = RLPolicyAnalyzer(model, enable_jacobian=True, enable_vector_analysis=True, track_distributions=False)
    stats = full.analyze(states, both_losses, 3, extractor)[1]
    assert stats.gradient_coherence == pytest.approx(1)
    assert stats.marginal_entropy is None
    batch = states().requires_grad_()
    (slope,) = torch.autograd.grad(both_losses(model(batch)), batch)
    assert stats.input_sensitivity == pytest.approx(float(slope.norm()), rel=1e-5)


def train_policy(analyzers: list[Any], steps: int = 50) -> tuple[ActorCritic, GradientManager]:
    """Train a policy, observed on every step where an analyzer is there."""
    torch.manual_seed(2)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with GradientManager(analyzers=analyzers, backends=["memory"]) as manager:
        for step in range(steps):
            optimizer.zero_grad()
            logits, values = model(states(step))
            policy = td.Categorical(logits=logits)
            actions = policy.sample()  # type: ignore[no-untyped-call]
            if analyzers:
                observer: Any = manager.analyzer("rl_policy")
                observer.observe(policy, episode_return=float(step), log_ratio=logits[:, 0] * 0)
            loss = -policy.log_prob(actions).mean() + values.square().mean()  # type: ignore[no-untyped-call]
            manager.step(model, optimizer, loss)
            optimizer.step()
    return model, manager


def test_training_is_bitwise_the_same_beside_the_analyzer() -> None:
    """Fifty steps of a policy, observed on every one, end in the same weights and random state."""
    plain, _ = train_policy([])
    state = torch.get_rng_state()
    watched, manager = train_policy([RLPolicyAnalyzer(enable_jacobian=True, enable_vector_analysis=True)])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, watched.state_dict()[name]) for name, value in plain.state_dict().items())
    assert sum("rl_policy" in report.analyzers for report in manager.reports) == 50


def test_live_numbers_reach_the_tracker() -> None:
    """What was observed before a step is in that step's row under rl/, and under no name that others use."""
    _, manager = train_policy([RLPolicyAnalyzer()], steps=3)
    memory: Any = manager.backend("memory")
    metrics = memory.records[0].metrics
    assert metrics["rl/discrete_entropy_normalized"] == pytest.approx(1, abs=0.2)
    assert metrics["rl/episode_return"] == 0
    assert metrics["rl/clip_fraction"] == 0
    assert metrics["rl/actor_critic_gradient_ratio"] > 0
    taken = {"train/entropy_loss", "train/clip_fraction", "train/std", "train/explained_variance", "train/approx_kl"}
    assert not taken & set(metrics)


def test_a_step_without_observation_reports_nothing() -> None:
    """Without observe there is nothing to look at, and later looks are at most every 16 steps."""
    analyzer = RLPolicyAnalyzer()
    assert not analyzer.due(1)
    analyzer.load_state_dict({**analyzer.state_dict(), "looks": 64, "last_look": 100})
    analyzer.observe(torch.zeros(2, 3))
    assert not analyzer.due(110)
    assert analyzer.due(116)


def test_observations_between_looks_are_averaged() -> None:
    """Two observations make one report, weighted by their states."""
    analyzer = RLPolicyAnalyzer()
    analyzer.observe(torch.zeros(3, 4))
    analyzer.observe(torch.tensor([[90.0, 0, 0, 0]]))
    report = analyzer.report()
    assert report.discrete_entropy_normalized == pytest.approx(0.75)
    assert (report.num_observations, report.num_states) == (2, 4)


def test_the_past_survives_a_checkpoint() -> None:
    """A restored analyzer judges as the one that was saved."""
    analyzer, _ = bandit(1.0)
    restored = RLPolicyAnalyzer()
    restored.load_state_dict(analyzer.state_dict())
    certain = torch.tensor([[50.0, 0, 0]]).repeat(4, 1)
    for each in (analyzer, restored):
        each.observe(certain)
    assert restored.report() == analyzer.report()


def test_wrong_use_is_named() -> None:
    """What cannot be read, and masks that do not fit, are errors that say what is expected."""
    analyzer = RLPolicyAnalyzer()
    with pytest.raises(InputTypeError, match="expected a torch distribution"):
        analyzer.observe("uniform")
    with pytest.raises(UsageError, match="expected one column per action"):
        analyzer.observe(torch.zeros(2, 3), mask=torch.ones(4, dtype=torch.bool))
    with pytest.raises(UsageError, match="Leave it out for continuous"):
        analyzer.observe(td.Normal(torch.zeros(2, 2), 1.0), mask=torch.ones(2, dtype=torch.bool))
    with pytest.raises(UsageError, match=r"Construct RLPolicyAnalyzer\(model\)"):
        analyzer.analyze(states, both_losses)
    gaussian = (torch.zeros(2, 2), torch.ones(2, 2))
    with pytest.raises(UsageError, match=r"action_range 1\.0: expected \(low, high\)"):
        analyzer.observe(gaussian, action_range=1.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected no low above its high"):
        analyzer.observe(gaussian, action_range=(1, -1))
    with pytest.raises(UsageError, match=r"mean of shape \(2, 2\), std of shape \(3,\)"):
        analyzer.observe((torch.zeros(2, 2), torch.ones(3)))


@pytest.mark.parametrize(
    ("distribution", "told", "fault", "match"),
    [
        (
            (torch.zeros(64, 2), -torch.ones(64, 2)),
            {},
            UsageError,
            r"std -1: expected deviations above 0\. Pass log_std",
        ),
        (
            (torch.zeros(64, 2), torch.zeros(64, 2)),
            {},
            UsageError,
            r"std 0: expected deviations above 0\. Pass log_std",
        ),
        (torch.zeros(64, 3), {"log_ratio": torch.zeros(3)}, UsageError, r"log_ratio of shape \(3,\): .* 64 states"),
        (torch.zeros(64, 3), {"log_ratio": torch.zeros(3, 64)}, UsageError, r"log_ratio of shape \(3, 64\)"),
        (torch.zeros(64, 3), {"log_ratio": "old"}, InputTypeError, "log_ratio str: expected a tensor of numbers"),
        (torch.zeros(64, 3), {"episode_return": [1.0, 2.0]}, InputTypeError, "episode_return list: expected a number"),
        (
            torch.zeros(64, 3),
            {"values": torch.zeros(64), "returns": torch.zeros(1)},
            UsageError,
            r"values of shape \(64,\), returns of shape \(1,\): expected as many of both",
        ),
    ],
)
def test_what_cannot_belong_to_an_observation_is_refused(
    distribution: Any, told: dict[str, Any], fault: type[Exception], match: str
) -> None:
    """The error says what is expected, and leaves no observation behind."""
    analyzer = RLPolicyAnalyzer()
    with pytest.raises(fault, match=match):
        analyzer.observe(distribution, **told)
    assert analyzer.report().num_observations == 0


@pytest.mark.parametrize(
    ("distribution", "ratios"),
    [
        (td.Categorical(logits=torch.zeros(4, 8, 3)), torch.zeros(4, 8)),
        (td.Normal(torch.zeros(32, 2), torch.ones(32, 2)), torch.zeros(32, 2)),
        (td.Normal(torch.zeros(32, 2), torch.ones(32, 2)), torch.zeros(32, 1)),
        (td.Independent(td.Normal(torch.zeros(32, 2), torch.ones(32, 2)), 1), np.zeros(32)),
    ],
)
def test_a_log_ratio_may_have_the_shape_of_the_batch(distribution: td.Distribution, ratios: Any) -> None:
    """States may have several axes, and a ratio may be told for each part of an action, or as an array."""
    assert observed(distribution, log_ratio=ratios).kl_k3 == 0


@pytest.mark.parametrize(
    ("distribution", "match"),
    [
        (torch.tensor([[0.0, 1.0], [math.nan, 0.0]]), "NaN or infinite"),
        ((torch.tensor([[0.0], [math.inf]]), torch.ones(2, 1)), "NaN or infinite"),
        (torch.softmax(torch.randn(64, 3), -1), "Pass the log of probabilities"),
        ([torch.zeros(2, 3), torch.tensor([[0.25, 0.75], [0.5, 0.5]])], "Pass the log of probabilities"),
        (
            td.Normal(torch.zeros(2, 1), torch.zeros(2, 1), validate_args=False),
            "deviations of the policy are not above",
        ),
        (td.Categorical(probs=torch.tensor([[0.25, 0.75], [1.0, 0.0]])), ""),
        (torch.tensor([[0.0, -math.inf], [0.0, 1.0]]), ""),
        (torch.zeros(0, 4), ""),
    ],
)
def test_what_is_doubtful_is_noted_once(distribution: Any, match: str) -> None:
    """A step notes it, the next ones do not; what is in order has no note."""
    model = ActorCritic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with GradientManager(analyzers=["rl_policy"], backends=["memory"]) as manager:
        notes = []
        for _ in range(2):
            policy: Any = manager.analyzer("rl_policy")
            policy.observe(distribution)
            report = manager.step(model, optimizer, both_losses(model(states())))
            notes.append([note for note in report.notes if note.startswith("rl_policy: ")])
            assert len(report.analyzers["rl_policy"]["notes"]) == bool(match)
    assert [len(found) for found in notes] == [bool(match), 0]
    assert all(match in note for note in notes[0])


@pytest.mark.parametrize(
    ("extract", "match"),
    [
        (lambda output: output, "action_extractor returned tuple of 2: expected"),
        (lambda output: output[0], "action_extractor returned Tensor: expected"),
        (lambda output: None, "action_extractor returned NoneType: expected"),
        (lambda output: (None, None, None, None), "returned neither logits nor std"),
        (
            lambda output: (None, output[0] * 0 - 1, output[0], None),
            r"std -1: expected deviations above 0\. Pass log_std\.exp\(\)",
        ),
    ],
)
def test_what_an_extractor_may_not_return_is_named(extract: Any, match: str) -> None:
    """The four things are asked for, and a standard deviation is not its logarithm."""
    with pytest.raises(UsageError, match=match):
        RLPolicyAnalyzer(ActorCritic()).analyze(states, both_losses, 1, action_extractor=extract)


def test_a_plain_number_is_a_std() -> None:
    """A standard deviation that is a number holds for every action."""
    _, stats = RLPolicyAnalyzer(ActorCritic()).analyze(
        states, both_losses, 1, action_extractor=lambda output: (None, 0.25, output[0], None)
    )
    assert stats.continuous_std_mean == pytest.approx(0.25)


def test_the_report_survives_json_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """A report reads back from its JSON as it was, and prints what is known."""
    report = observed(torch.tensor([[50.0, 0, 0]]).repeat(9, 1))
    assert PolicyReport.model_validate_json(report.model_dump_json()) == report
    RLPolicyAnalyzer().print_summary(report.issues, report)
    printed = capsys.readouterr().out
    assert "discrete_entropy_normalized" in printed
    assert "entropy collapse risk: HIGH (low confidence)" in printed


def test_logits_that_are_not_finite_are_not_judged() -> None:
    """A policy that diverged has no entropy, and no verdict on it is made up."""
    report = observed(torch.full((3, 4), float("nan")))
    assert report.entropy_level is None
    assert report.entropy_collapse_risk is None
    assert report.issues == []


def gym_env(space: Any) -> Any:
    """Return a tiny environment with an action space."""
    gymnasium = pytest.importorskip("gymnasium")

    class Tiny(gymnasium.Env):  # type: ignore[misc,name-defined]
        """Eight steps of noise, paid for small actions."""

        observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
        action_space = space

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            self.steps = 0
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.steps += 1
            return self.observation_space.sample(), -float(np.abs(action).sum()), self.steps >= 8, False, {}

    return Tiny()


@pytest.mark.parametrize("kind", ["Discrete", "MultiDiscrete", "MultiBinary", "Box"])
def test_entropy_equals_that_of_stable_baselines(kind: str) -> None:
    """On the same rollout, entropy in nats is minus PPO's own train/entropy_loss, for each of its action spaces."""
    spaces = pytest.importorskip("gymnasium").spaces
    sb3 = pytest.importorskip("stable_baselines3")
    space = {
        "Discrete": lambda: spaces.Discrete(4),
        "MultiDiscrete": lambda: spaces.MultiDiscrete([3, 5]),
        "MultiBinary": lambda: spaces.MultiBinary(3),
        "Box": lambda: spaces.Box(-1.0, 1.0, (2,), np.float32),
    }[kind]()
    options: dict[str, Any] = {"n_steps": 32, "batch_size": 32, "n_epochs": 1, "learning_rate": 0.03, "seed": 0}
    model = sb3.PPO("MlpPolicy", gym_env(space), device="cpu", **options)
    model.learn(32 * 3)
    batch = next(model.rollout_buffer.get(32))
    report = observed(model.policy.get_distribution(batch.observations))
    model.train()
    reported = model.logger.name_to_value["train/entropy_loss"]
    found = report.continuous_entropy_mean if kind == "Box" else report.discrete_entropy_mean
    assert found == pytest.approx(-reported, abs=1e-5)
    assert reported != pytest.approx(-math.log(4), abs=1e-3)


def test_the_squashed_gaussian_of_stable_baselines_is_squashed() -> None:
    """SAC's distribution is read as tanh of a Gaussian, not as the Gaussian that it holds."""
    distributions = pytest.importorskip("stable_baselines3.common.distributions")
    found = distributions.SquashedDiagGaussianDistribution(2).proba_distribution(torch.zeros(5, 2), torch.zeros(5, 2))
    report = observed(found)
    expected = observed(tanh(1.0))
    assert report.squashed
    assert report.continuous_entropy_mean == pytest.approx(expected.continuous_entropy_mean)
