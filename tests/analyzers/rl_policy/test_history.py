"""The past of a policy and the judgement of its entropy by what it earns."""

import pytest

from gradtrack.analyzers.rl_policy.history import PolicyHistory


def history(levels: list[float], returns: list[float] | None = None) -> PolicyHistory:
    """Return the past of a run."""
    past = PolicyHistory()
    for index, level in enumerate(levels):
        past.add(level, None if returns is None else returns[index])
    return past


def test_little_entropy_without_returns_is_a_high_risk() -> None:
    """Below a tenth of the largest entropy the risk is high while nothing speaks for the policy."""
    past = history([0.05] * 20)
    assert past.pays is None
    assert past.risk(0.05) == "HIGH"


def test_steady_entropy_is_no_risk() -> None:
    """A level that only wobbles does not fall."""
    assert history([0.7, 0.71, 0.69, 0.7, 0.7, 0.71, 0.7, 0.69] * 4).risk(0.7) == "LOW"


@pytest.mark.parametrize(("slope", "expected"), [(0.02, "HIGH"), (0.005, "MEDIUM"), (0.0005, "LOW")])
def test_falling_entropy_is_judged_by_when_it_arrives(slope: float, expected: str) -> None:
    """The risk is high when the floor is less than 25 observations away, medium below 100."""
    levels = [0.45 + slope * (29 - index) for index in range(30)]
    assert history(levels).risk(levels[-1]) == expected


def test_falling_entropy_that_buys_return_is_normal() -> None:
    """The same fall is no risk while returns rise significantly."""
    levels = [0.9 - 0.02 * index for index in range(30)]
    assert history(levels, [float(index) for index in range(30)]).risk(levels[-1]) == "LOW"
    assert history(levels, [1.0, 0.0] * 15).risk(levels[-1]) == "HIGH"


def test_a_solved_task_may_be_deterministic() -> None:
    """Returns that rose and stay at their best keep the risk low, long after they stopped rising."""
    returns = [min(index / 40, 1.0) for index in range(400)]
    past = history([max(1 - index / 40, 0.001) for index in range(400)], returns)
    assert past.rising is False
    assert past.solved
    assert past.risk(0.001) == "LOW"


def test_returns_that_fall_back_are_not_solved() -> None:
    """A policy that collapsed after it had learnt earns less than at its best."""
    returns = [min(index / 20, 1.0) for index in range(60)] + [0.2] * 100
    past = history([0.05] * 160, returns)
    assert not past.solved
    assert past.risk(0.05) == "HIGH"


def test_an_informed_policy_without_returns_is_a_medium_risk() -> None:
    """Certain actions that differ by state may be good; only returns can tell."""
    assert history([0.02] * 9).risk(0.02, informed=True) == "MEDIUM"
    assert history([0.02] * 9, [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.5]).risk(0.02, informed=True) == "HIGH"


def test_entropy_that_is_lost_to_knowing_the_state_is_no_risk() -> None:
    """A level that falls because actions depend on the state is what learning does, unless returns say otherwise."""
    levels = [0.9 - 0.02 * index for index in range(30)]
    assert history(levels).risk(levels[-1], informed=True) == "LOW"
    assert history(levels).risk(levels[-1]) == "HIGH"
    assert history(levels, [1.0, 0.0] * 15).risk(levels[-1], informed=True) == "HIGH"


def test_too_much_exploration_needs_stagnating_returns() -> None:
    """A uniform policy explores too much only when 50 returns or more do not rise."""
    assert history([0.99] * 10, [0.0, 1.0] * 5).adequacy(0.99, 0.1) == "ADEQUATE"
    assert history([0.99] * 60, [0.0, 1.0] * 30).adequacy(0.99, 0.1) == "TOO_HIGH"
    assert history([0.99] * 60, [float(index) for index in range(60)]).adequacy(0.99, 0.1) == "ADEQUATE"


def test_unknown_levels_are_not_judged() -> None:
    """NaN leaves no trace, and no level has no risk."""
    past = history([float("nan")] * 10)
    assert not past.levels
    assert past.risk(None) is None
    assert past.risk(float("nan")) is None


def test_the_past_survives_a_checkpoint() -> None:
    """What `state_dict` returned gives the same judgement."""
    past = history([0.3] * 60, [float(index) for index in range(60)])
    restored = PolicyHistory()
    restored.load_state_dict(past.state_dict())
    assert restored.state_dict() == past.state_dict()
    assert restored.risk(0.3) == past.risk(0.3)


def test_a_policy_that_comes_trained_may_be_sure_of_itself() -> None:
    """A level that was low from the first is no collapse while returns stay at their best."""
    sure = history([0.05] * 20, [0.95, 1.0, 0.97, 1.0, 0.98] * 4)
    assert (sure.risk(0.05), sure.adequacy(0.05, 0.5)) == ("LOW", "ADEQUATE")
    lost = history([0.9, 0.5, *[0.05] * 18], [0.95, 1.0, 0.97, 1.0, 0.98] * 4)
    assert (lost.risk(0.05), lost.adequacy(0.05, 0.5)) == ("HIGH", "TOO_LOW")


def test_exploration_that_is_driven_up_is_too_much() -> None:
    """A level that rises to its largest while returns stagnate is told long before fifty returns are known."""
    levels = [0.9 + 0.099 * (1 - 0.8**step) for step in range(30)]
    assert history(levels, [0.1, 0.2] * 15).adequacy(levels[-1], 0.5) == "TOO_HIGH"
    assert history([0.999] * 30, [0.1, 0.2] * 15).adequacy(0.999, 0.5) == "ADEQUATE"


def test_the_minibatches_of_one_rollout_are_no_returns_of_their_own() -> None:
    """Sixteen updates that come with one return are one return; a policy that never earns is told much later."""
    rollouts = [20.0, 23.2, 25.4, 27.1, 34.3, 28.2, 30.0, 32.7, 29.0, 31.0]
    assert history([0.99] * 160, [each for each in rollouts for _ in range(16)]).adequacy(0.99, 0.1) == "ADEQUATE"
    assert history([0.99] * 1000, [-1200.0] * 1000).adequacy(0.99, 0.1) == "ADEQUATE"
    assert history([0.99] * 1600, [0.0] * 1600).adequacy(0.99, 0.1) == "TOO_HIGH"
