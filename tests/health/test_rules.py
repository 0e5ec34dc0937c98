"""The rules: what opens them, what does not, and that the scale of the loss is no matter."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrack import GradientConfig, GradientManager, Issue
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.moments import Moments, empty_row
from gradtrack.health.rule import Evidence
from gradtrack.health.rule_engine import RULES, Health
from tests.training import batch_loss, small_model

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


@pytest.mark.parametrize(
    ("squares", "layer", "said"),
    [
        ([1.0, 1e8, 0.0, 1.0], "a", "100% of its square is in group a, 100% in a.bias alone"),
        ([1.0, 0.0, 1e8, 1.2e8], "b", "100% of its square is in group b, 55% in b.bias alone"),
        ([1e8, 0.0, 1e8, 1e8], "b", "67% of its square is in group b, 33% in a.weight alone"),
        ([4e7, 4e7, 1e8, 0.0, 1e8], "", "36% of its square is in group b, 36% in b.weight alone"),
    ],
)
def test_a_spike_names_what_holds_it(squares: list[float], layer: str, said: str) -> None:
    """The layer is that of the parameter with most of the norm, else the group with most; a run of spikes keeps it."""
    names = ["a.weight", "a.bias", "b.weight", "b.bias", "c"][: len(squares)]
    layout = Layout(names, [], [4] * len(names), np.array([0, 0, 1, 1, 2][: len(names)]), ["a", "b", "c"], [])
    health = Health()

    def step(number: int, found: list[float]) -> list[Issue]:
        rows = np.array([[0.0, square, *empty_row()[2:]] for square in found])
        moments = Moments(rows, rows, rows.sum(axis=0).tolist())
        evidence = Evidence(step=number, norm=moments.norm, moments=moments, layout=layout)
        return health.judge(evidence, GradientConfig())

    assert not any(step(number, [1.0] * len(names)) for number in range(1, 31))
    (issue,) = step(31, squares)
    assert issue.layer == layer
    assert said in issue.message
    (still,) = step(32, [1e9, *[0.0] * (len(names) - 1)])
    assert still.key == issue.key


def losses_of(*parts: tuple[int, float]) -> list[float]:
    """Return losses that stay at a level for some steps, with a little noise."""
    noise = iter(noisy(sum(count for count, _ in parts), spread=0.1))
    return [level * next(noise) for count, level in parts for _ in range(count)]


class TestLossJump:
    """A loss that is far above all it was."""

    def test_it_stays(self) -> None:
        """The issue opens when the loss has stayed for twenty steps, and closes when it is back."""
        found = judged([1.0] * 120, losses_of((30, 1.0), (30, 0.02), (40, 5425.0), (20, 0.02)))
        opened = [step for step, kinds in enumerate(found, start=1) if "LOSS_JUMP" in kinds]
        assert opened == list(range(80, 101))

    def test_the_step_is_named(self) -> None:
        """The message has the first step of the new level, however long it lasts."""
        health, messages = Health(), []
        rows = np.array([[0.0, 1.0, *empty_row()[2:]]])
        for step, loss in enumerate(losses_of((40, 0.02), (30, 5425.0)), start=1):
            evidence = Evidence(step=step, norm=1.0, moments=Moments(rows, rows, rows[0].tolist()), layout=LAYOUT)
            evidence.loss = loss
            messages += [issue.message for issue in health.judge(evidence, GradientConfig())]
        assert len(messages) == 11
        assert all(" at step 41 and" in message for message in messages)

    @pytest.mark.parametrize(
        "losses",
        [
            losses_of((60, 1.0), (19, 1e4), (60, 1.0)),
            losses_of((30, 2.0), (40, 0.01), (60, 2.0)),
            losses_of((60, 1.0), (60, 5.0)),
            [*losses_of((60, -0.01)), *losses_of((60, 50.0))],
            [1.05**step for step in range(200)],
        ],
        ids=["comes back", "was so at first", "a small one", "of both signs", "grows"],
    )
    def test_what_is_none(self, losses: list[float]) -> None:
        """Neither is a loss that comes back, that was as large before, or that is no size."""
        assert not any("LOSS_JUMP" in kinds for kinds in judged([1.0] * len(losses), losses))


class TestUnchanged:
    """Weights that no update changes."""

    @staticmethod
    def types(**settings: Any) -> list[str]:
        """Return the types of the issues after a short training with such a mistake."""
        manager, model = GradientManager(**{"backends": [], **settings.pop("config", {})}), small_model()
        optimizer = settings.pop("make", torch.optim.Adam)(model.parameters(), lr=settings.pop("lr", 1e-2))
        for step in range(1, 9):
            optimizer.zero_grad()
            manager.step(model, optimizer, batch_loss(model, step))
            if "clear" in settings:
                optimizer.zero_grad(set_to_none=settings["clear"])
            if step % settings.get("each", 1) == 0:
                optimizer.step()
        return [issue.issue_type.value for issue in manager.reports[-1].health.issues]

    @pytest.mark.parametrize("mistake", [{"each": 99}, {"clear": True}, {"clear": False}])
    @pytest.mark.parametrize("config", [{}, {"grad_log_every_n_steps": 1}, {"analyzers": "auto"}])
    def test_mistakes(self, mistake: dict[str, Any], config: dict[str, Any]) -> None:
        """A step that is never made, or made without gradients, is told with default settings."""
        assert self.types(**mistake, config=config) == ["UNCHANGED"]

    @pytest.mark.parametrize(
        "sound",
        [{}, {"lr": 0.0}, {"each": 2}, {"make": torch.optim.SGD, "lr": 1e-5}, {"make": torch.optim.SGD, "lr": 1e-12}],
    )
    def test_sound_ones(self, sound: dict[str, Any]) -> None:
        """Neither a rate of zero nor a small one is a mistake."""
        assert self.types(**sound) == []

    def test_it_closes(self) -> None:
        """Once the optimizer steps, the next row closes it."""
        manager, model = GradientManager(backends=[]), small_model()
        optimizer = torch.optim.Adam(model.parameters())
        opened = []
        for step in range(1, 18):
            manager.step(model, optimizer, batch_loss(model, step))
            opened += [step] * (not manager.reports[-1].health.healthy)
            if step >= 6:
                optimizer.step()
            optimizer.zero_grad()
        assert opened == [4, 5, 6, 7]


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
