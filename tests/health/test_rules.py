"""The rules: what opens them, what does not, and that the scale of the loss is no matter."""

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack import GradientConfig, Issue
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.moments import Moments, empty_row
from gradtrack.health.rule import Evidence
from gradtrack.health.rule_engine import RULES, Health

LAYOUT = Layout(["a"], [], [4], np.zeros(1, dtype=np.int64), ["all"], [])


def judged(
    norms: Sequence[float],
    losses: Sequence[float] | None = None,
    *,
    limit: float | None = None,
    config: GradientConfig | None = None,
    health: Health | None = None,
) -> list[set[str]]:
    """Return the types of the issues that are open after each step of a run with these norms."""
    health, config = health or Health(), config or GradientConfig()
    found = []
    for index, norm in enumerate(norms):
        row = empty_row()
        if math.isfinite(norm):
            row[1] = norm * norm
        else:
            row[5] = 1.0
        rows = np.array([row])
        evidence = Evidence(
            step=index + 1,
            norm=norm,
            moments=Moments(rows, rows, row),
            layout=LAYOUT,
            loss=None if losses is None else losses[index],
            clipped=limit is not None and norm > limit,
            clip_threshold=limit,
        )
        found.append({issue.issue_type.value for issue in health.judge(evidence, config)})
    return found


def noisy(count: int, seed: int = 0, spread: float = 0.3) -> list[float]:
    """Return the norms of a healthy run."""
    return [float(norm) for norm in np.exp(np.random.default_rng(seed).normal(0.0, spread, count))]


@given(seed=st.integers(0, 1000), spread=st.floats(0.01, 0.7))
def test_silence_on_noise(seed: int, spread: float) -> None:
    """Norms that only fluctuate open nothing."""
    assert judged(noisy(120, seed, spread), [1.0] * 120) == [set()] * 120


@given(scale=st.integers(-60, 60), seed=st.integers(0, 50))
def test_scale_of_the_loss_is_no_matter(scale: int, seed: int) -> None:
    """Multiplying every norm and loss by a power of two gives the same verdicts at the same steps."""
    norms = [*noisy(40, seed), 1e5, *noisy(10, seed + 1), math.nan, *[1e-7] * 10, *([1e4, 1e-4] * 15)]
    losses, factor = [1.0] * len(norms), 2.0**scale
    scaled = judged([norm * factor for norm in norms], [loss * factor for loss in losses])
    assert scaled == judged(norms, losses)


class TestExploding:
    """Sudden large norms."""

    def test_spike(self) -> None:
        """A jump opens the issue and the next ordinary step closes it."""
        found = judged([*noisy(30), 1e3, 1.0])
        assert found[30:] == [{"EXPLODING"}, set()]

    def test_a_lasting_level_is_accepted(self) -> None:
        """What has lasted for a whole window is the new normal."""
        found = judged([*noisy(30), *[1e3] * 80])
        assert found[31] == {"EXPLODING"}
        assert found[-1] == set()

    def test_a_noisy_run_needs_a_larger_jump(self) -> None:
        """Ten times the median is nothing special where the norm varies as much."""
        assert "EXPLODING" not in judged([*noisy(50, spread=1.5), 12.0])[-1]

    def test_absolute_limit_of_the_user(self) -> None:
        """A limit in absolute terms acts only when it was set."""
        config = GradientConfig(exploding_threshold=10.0)
        assert judged([11.0], config=config) == [{"EXPLODING"}]
        assert judged([11.0]) == [set()]


class TestVanishing:
    """Norms that die away."""

    def test_without_learning(self) -> None:
        """A norm that falls to nothing while the loss stays is an issue."""
        norms = [*noisy(20), *[1e-6] * 10]
        assert judged(norms, [1.0] * 30)[-1] == {"VANISHING"}

    def test_convergence_is_no_fault(self) -> None:
        """A norm that falls with the loss is what training is for."""
        losses = [*[1.0] * 20, *[1e-6] * 10]
        assert judged([*noisy(20), *[1e-6] * 10], losses)[-1] == set()

    def test_patience(self) -> None:
        """A few small steps are not enough."""
        assert judged([*noisy(20), *[1e-6] * 4, 1.0], [1.0] * 25)[-2:] == [set(), set()]

    def test_never_alive(self) -> None:
        """Gradients that are zero from the start are an issue."""
        assert judged([0.0] * 6, [1.0] * 6)[-1] == {"VANISHING"}

    def test_absolute_limit_of_the_user(self) -> None:
        """A limit in absolute terms acts only when it was set."""
        assert judged([1e-7], config=GradientConfig(vanishing_threshold=1e-6)) == [{"VANISHING"}]


def test_unstable() -> None:
    """Tenfold changes on every other step are an issue after twenty of them."""
    found = judged([1.0, 50.0] * 15)
    assert found[10] == set()
    assert "UNSTABLE" in found[-1]


def test_unstable_closes_later_than_it_opens() -> None:
    """Changes on every third step open nothing, but keep open what was opened by more of them."""
    slower = [*[1.0] * 3, *[50.0] * 3] * 6
    assert "UNSTABLE" in judged([*[1.0, 50.0] * 15, *slower])[-1]
    assert "UNSTABLE" not in judged([*slower, *slower])[-1]


def test_a_jump_to_where_the_norm_was_at_first_is_none() -> None:
    """A norm that has become small may come back to what it was; only what is beyond all before is a jump."""
    norms = [*noisy(20), *(1e-3 * norm for norm in noisy(60, seed=1))]
    assert judged([*norms, 1.5], [1.0, *[0.9] * 80])[-1] == set()
    assert judged([*norms, 50.0], [1.0, *[0.9] * 80])[-1] == {"EXPLODING"}


def test_clip_saturated() -> None:
    """A limit that is a hundred times below every norm is named, one that is near them is not."""
    assert (
        "CLIP_SATURATED"
        in judged([500.0 * norm for norm in noisy(80)], limit=1.0, config=GradientConfig(max_grad_norm=1.0))[-1]
    )
    assert "CLIP_SATURATED" not in judged([500.0 * norm for norm in noisy(80)], limit=1.0)[-1]
    assert judged([5.0 * norm for norm in noisy(80)], limit=1.0)[-1] == set()


def test_nonfinite_closes_with_the_first_finite_step() -> None:
    """A NaN is an issue on its own step only, and enters no window."""
    found = judged([*noisy(30), math.nan, *noisy(30, seed=1)])
    assert [step for step, types in enumerate(found) if types] == [30]


def test_mute() -> None:
    """A muted rule is silent."""
    assert judged([*noisy(30), 1e3], config=GradientConfig(mute=["EXPLODING"]))[-1] == set()


def test_every_issue_is_complete() -> None:
    """Each rule fills in what a person needs to act."""
    seen: dict[str, Issue] = {}
    health, original = Health(), Health.judge

    def keep(self: Health, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        issues = original(self, evidence, config)
        seen.update({issue.issue_type.value: issue for issue in issues})
        return issues

    class Keeping(Health):
        judge = keep

    health = Keeping()
    judged([*noisy(60), 1e4, math.nan, *[1e-7] * 8, *([1e-3, 1e3] * 15)], [1.0] * 100, health=health)
    assert {"EXPLODING", "NUMERICAL", "VANISHING", "UNSTABLE"} <= set(seen)
    for issue in seen.values():
        assert issue.message.endswith(".")
        assert issue.recommendation
        assert issue.statistic
        assert issue.value is not None
        assert issue.threshold is not None


@pytest.mark.parametrize("cut", [3, 25, 61, 70])
def test_state_continues(cut: int) -> None:
    """Windows that were saved as JSON and loaded go on as if nothing had happened."""
    norms = [*noisy(60), 1e4, *[1e-7] * 8, *([1e-3, 1e3] * 15)]
    losses = [1.0] * len(norms)
    first, second = Health(), Health()
    judged(norms[:cut], losses[:cut], health=first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert judged(norms[cut:], losses[cut:], health=second) == judged(norms, losses)[cut:]


def test_each_rule_is_one_file() -> None:
    """Every file in the folder holds a rule that can be made without arguments."""
    assert {"numerical", "spike", "vanishing", "unstable", "clip_saturated"} <= set(RULES)


@pytest.mark.parametrize("name", sorted(RULES))
def test_checkpoints_keep_all_that_a_rule_remembers(name: str) -> None:
    """An attribute that is added is either kept or named here with the reason."""
    rule = RULES[name]()
    assert set(vars(rule)) == set(rule.kept_in_checkpoints)
