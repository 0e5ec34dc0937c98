"""The callback for Stable-Baselines3, in real trainings."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradtrack.errors import UsageError

pytest.importorskip("stable_baselines3")
import stable_baselines3
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure

from gradtrack.integrations.stable_baselines3 import GradtrackCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def clipped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Collect the norms that torch measures when the algorithm clips, which the algorithm throws away."""
    found: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_

    def clip_and_keep(*arguments: Any, **keywords: Any) -> torch.Tensor:
        norm = clip(*arguments, **keywords)
        found.append(float(norm))
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_keep)
    yield found
    monkeypatch.undo()


def algorithm(name: str, **options: Any) -> Any:
    """Return an algorithm that learns quickly and little."""
    sizes: dict[str, dict[str, Any]] = {
        "PPO": {"n_steps": 64, "batch_size": 32, "n_epochs": 2},
        "A2C": {"n_steps": 8},
        "DQN": {"learning_starts": 20, "buffer_size": 200, "batch_size": 8},
        "SAC": {"learning_starts": 20, "buffer_size": 200, "batch_size": 8},
        "TD3": {"learning_starts": 20, "buffer_size": 200, "batch_size": 8},
    }
    world = options.pop("world", "Pendulum-v1" if name in ("SAC", "TD3") else "CartPole-v1")
    kind = getattr(stable_baselines3, name)
    return kind("MlpPolicy", world, seed=0, device="cpu", **{**sizes[name], **options})


@pytest.mark.parametrize("name", ["PPO", "A2C", "DQN"])
def test_the_norm_is_the_one_that_the_algorithm_throws_away(name: str, clipped: list[float]) -> None:
    """Every update's norm before clipping, to 1e-5, and a note on who clips."""
    callback = GradtrackCallback()
    algorithm(name).learn(128, callback=callback)
    assert len(clipped) == len(callback.reports) > 3
    assert [report.clipping.norm_before for report in callback.reports] == pytest.approx(clipped, rel=1e-5)
    assert f"{name} clips at max_grad_norm" in callback.reports[0].notes[0]


@pytest.mark.parametrize("name", ["SAC", "TD3"])
def test_the_norms_of_actor_and_critic_are_torchs(name: str) -> None:
    """Where nothing is clipped, the norm is that of the gradients with which each optimizer steps, to 1e-5."""
    model, callback = algorithm(name), GradtrackCallback()
    theirs: dict[str, list[float]] = {"actor": [], "critic": []}

    def keep(part: str, optimizer: Any) -> None:
        grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        theirs[part].append(float(torch.nn.utils.get_total_norm(grads)))

    for part in theirs:
        getattr(model, part).optimizer.register_step_pre_hook(lambda one, *_, part=part: keep(part, one))
    model.learn(60, callback=callback)
    for part, norms in theirs.items():
        ours = [report.clipping.norm_before for report in callback.reports if report.source == part]
        assert len(ours) > 10
        assert ours == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("name", ["SAC", "TD3"])
def test_analyzers_look_from_within_the_steps(name: str) -> None:
    """The flow of actor and critic is looked at in hooks of their optimizers, which stay as they are meanwhile."""
    callback = GradtrackCallback(analyzers="auto", backends=["memory"])
    algorithm(name).learn(60, callback=callback)
    assert sum(report.source == "critic" for report in callback.reports) > 30


def test_actor_and_critic_have_their_own_reports() -> None:
    """SAC's two optimizers are two pairs with their own counts, and gradtrack clips them when asked to."""
    callback = GradtrackCallback(max_grad_norm=1e-3)
    algorithm("SAC").learn(30, callback=callback)
    found = {(report.source, report.step) for report in callback.reports}
    assert found == {(name, step) for name in ("actor", "critic") for step in range(1, 11)}
    assert all(report.clipping.clipped for report in callback.reports)


@pytest.mark.parametrize(("name", "world"), [("PPO", "CartPole-v1"), ("A2C", "CartPole-v1"), ("PPO", "Pendulum-v1")])
def test_entropy_agrees_with_the_algorithms_own(name: str, world: str) -> None:
    """The mean over the updates of a rollout is what the algorithm logs, for choices and for Gaussians."""
    callback = GradtrackCallback()
    model = algorithm(name, world=world)
    model.learn(model.n_steps, callback=callback)
    shown = model.logger.name_to_value["train/entropy_loss"]
    kind = "discrete" if world == "CartPole-v1" else "continuous"
    ours = [report.analyzers["rl_policy"][f"{kind}_entropy_mean"] for report in callback.reports]
    assert len(ours) == {"PPO": 4, "A2C": 1}[name]
    assert -sum(ours) / len(ours) == pytest.approx(shown, rel=1e-5)


def test_entropy_agrees_with_the_likelihoods_of_sac() -> None:
    """SAC has samples of its squashed Gaussian only: the entropy is their mean, negative log-likelihood."""
    model, callback = algorithm("SAC", batch_size=512), GradtrackCallback()
    theirs: list[float] = []
    compute = model.actor.action_log_prob

    def compute_and_keep(*arguments: Any) -> Any:
        found = compute(*arguments)
        if torch.is_grad_enabled():
            theirs.append(-float(found[1].detach().mean()))
        return found

    model.actor.action_log_prob = compute_and_keep
    model.learn(30, callback=callback)
    reports = [report.analyzers["rl_policy"] for report in callback.reports if "rl_policy" in report.analyzers]
    assert len(reports) == len(theirs) == 10
    ours = [report["continuous_entropy_mean"] for report in reports]
    assert sum(ours) / 10 == pytest.approx(sum(theirs) / 10, abs=0.05)
    assert model.actor.action_log_prob is compute_and_keep


def test_the_policy_panel_is_the_actors() -> None:
    """SAC's rows have the policy's metrics under the actor, and an algorithm without a distribution has none."""
    found = {}
    for name in ("SAC", "DQN"):
        model = algorithm(name).learn(30, callback=GradtrackCallback(grad_log_every_n_steps=1))
        found[name] = {key for key in model.logger.name_to_value if key.startswith("rl/")}
    assert "rl/continuous_std_mean/actor" in found["SAC"]
    assert all(key.endswith("/actor") for key in found["SAC"])
    assert found["DQN"] == set()


def test_rows_reach_the_algorithms_own_logger(tmp_path: Path) -> None:
    """The last row is in the logger's table, beside the algorithm's own values."""
    model, callback = algorithm("PPO", verbose=0), GradtrackCallback(grad_log_every_n_steps=1)
    model.set_logger(configure(str(tmp_path), ["csv", "log"]))
    model.learn(192, callback=callback)
    model.logger.close()
    header, *lines = (tmp_path / "progress.csv").read_text().splitlines()
    last = dict(zip(header.split(","), lines[-1].split(","), strict=True))
    assert float(last["train/grad_norm"]) == pytest.approx(callback.reports[7].clipping.norm_before)
    assert last["gradtrack/step"] == "8"
    assert "train/grad_norm/action_net" in last
    assert "rl/discrete_entropy_normalized" in last


@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_watching_changes_nothing(name: str) -> None:
    """The weights are bitwise those of a training without the callback."""
    watched = algorithm(name).learn(70, callback=GradtrackCallback(backends=["memory"]))
    plain = algorithm(name).learn(70)
    for one, two in zip(watched.policy.parameters(), plain.policy.parameters(), strict=True):
        assert torch.equal(one, two)


def test_learning_on_counts_on() -> None:
    """A second call of learn goes on with the steps of the first, and nothing stays hooked."""
    model, callback = algorithm("A2C"), GradtrackCallback(backends=["memory"])
    model.learn(16, callback=callback)
    model.learn(16, callback=callback, reset_num_timesteps=False)
    assert [report.step for report in callback.reports] == [3, 4]
    assert callback.manager.get_training_summary().total_steps == 4
    assert "_get_action_dist_from_latent" not in vars(model.policy)
    assert not any(param._post_accumulate_grad_hooks for param in model.policy.parameters())


@pytest.mark.parametrize("name", ["PPO", "A2C", "DQN", "SAC"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_loaded_model_counts_on(name: str, goes_on: bool, tmp_path: Path) -> None:
    """A new callback on a loaded model goes on with the steps of the optimizer, unless the learning begins anew."""
    model, first, second = algorithm(name), GradtrackCallback(), GradtrackCallback()
    model.learn(128, callback=first).save(tmp_path / "model.zip")
    loaded = getattr(stable_baselines3, name).load(tmp_path / "model.zip", env=model.get_env())
    loaded.learn(64, callback=CallbackList([second]), reset_num_timesteps=not goes_on)
    last = {report.source: report.step for report in first.reports}
    begins = {report.source: report.step for report in reversed(second.reports)}
    assert begins == {source: step + 1 if goes_on else 1 for source, step in last.items()}


def test_several_worlds_among_other_callbacks(tmp_path: Path) -> None:
    """With a vector of worlds and in a list of callbacks: one report for each update, entropy as the algorithm's."""
    worlds = make_vec_env("CartPole-v1", 4, seed=0)
    model = stable_baselines3.PPO("MlpPolicy", worlds, n_steps=16, batch_size=32, n_epochs=2, seed=0, device="cpu")
    callback = GradtrackCallback()
    model.learn(64, callback=CallbackList([CheckpointCallback(8, str(tmp_path)), CallbackList([callback])]))
    assert [report.step for report in callback.reports] == [1, 2, 3, 4]
    ours = [report.analyzers["rl_policy"]["discrete_entropy_mean"] for report in callback.reports]
    assert -sum(ours) / 4 == pytest.approx(model.logger.name_to_value["train/entropy_loss"], rel=1e-5)
    assert list(tmp_path.glob("rl_model_*.zip"))


@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_nothing_stays_hooked_where_an_issue_ends_the_training(name: str) -> None:
    """What `on_issue` raises comes out of learn(), and the policy is as it was."""

    def stop(issue: Any, report: Any) -> None:
        raise ZeroDivisionError

    model, callback = algorithm(name), GradtrackCallback(on_issue=stop, backends=["memory"])
    part = model.policy if name == "PPO" else model.critic
    with torch.no_grad():
        next(param for param in list(part.parameters())[::-1] if param.numel() == 1).fill_(float("nan"))
    with pytest.raises(ZeroDivisionError):
        model.learn(64, callback=callback)
    assert callback.manager.backend("memory").failed  # type: ignore[attr-defined]
    assert not any(param._post_accumulate_grad_hooks for param in model.policy.parameters())
    assert not {"_get_action_dist_from_latent", "action_log_prob"} & (vars(model.policy).keys() | vars(part).keys())


class Saving(BaseCallback):  # type: ignore[misc]
    """Saves the model in the middle of its training."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def _on_step(self) -> bool:
        if self.n_calls == 70:
            self.model.save(self.path)
        return True


def test_what_is_saved_while_learning_is_the_models_own(tmp_path: Path) -> None:
    """A checkpoint from within a watched training has nothing of ours, and learns on."""
    saving, path = Saving(tmp_path / "watched.zip"), tmp_path / "plain.zip"
    algorithm("PPO").learn(100, callback=[GradtrackCallback(), saving])
    algorithm("PPO").learn(100, callback=Saving(path))
    watched, plain = (stable_baselines3.PPO.load(file, env=algorithm("PPO").env) for file in (saving.path, path))
    assert vars(watched).keys() == vars(plain).keys()
    assert watched.learn(64).num_timesteps == 64


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["env", "policy"])
@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_a_crash_leaves_nothing_behind(name: str, place: str, kind: type[BaseException]) -> None:
    """Where the world or an update breaks, the training ends as failed, and the model is as it was."""
    model, callback = algorithm(name), GradtrackCallback(backends=["memory"])
    owner = model.env if place == "env" else model.policy
    method = "step" if place == "env" else "set_training_mode"
    call, world = getattr(owner, method), place == "env"

    def crash(*arguments: Any) -> Any:
        if callback.reports and (world or arguments == (True,)):
            raise kind
        return call(*arguments)

    setattr(owner, method, crash)
    with pytest.raises(kind):
        model.learn(300, callback=callback)
    assert callback.manager.backend("memory").failed  # type: ignore[attr-defined]
    assert not {"train", "collect_rollouts", "dump_logs", "_excluded_save_params"} & vars(model).keys()
    assert not any(param._post_accumulate_grad_hooks for param in model.policy.parameters())
    optimizers = [part.optimizer for part in model.policy.modules() if hasattr(part, "optimizer")]
    assert optimizers
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in optimizers)


class BrokenStart(BaseCallback):  # type: ignore[misc]
    """Raises where a training begins."""

    def _on_training_start(self) -> None:
        raise ZeroDivisionError

    def _on_step(self) -> bool:
        return True


@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_hooks_are_inert_where_another_callback_breaks_the_start(name: str) -> None:
    """Gradients of the user's own stay as they are, and a later training without us finds the model as it was."""
    model, callback = algorithm(name), GradtrackCallback(max_grad_norm=1e-3, backends=["memory"])
    with pytest.raises(ZeroDivisionError):
        model.learn(64, callback=[callback, BrokenStart()])
    part = model.policy if name == "PPO" else model.critic
    part.optimizer.zero_grad()
    sum(param.sum() for param in part.parameters() if param.requires_grad).backward()
    part.optimizer.step()
    assert all(float(param.grad.min()) == 1.0 for param in part.parameters() if param.grad is not None)
    assert callback.reports == []
    model.learn(64)
    assert callback.reports == []
    assert callback.manager.backend("memory").failed  # type: ignore[attr-defined]
    assert not {"train", "collect_rollouts", "dump_logs", "_setup_learn", "_excluded_save_params"} & vars(model).keys()
    assert not any(param._post_accumulate_grad_hooks for param in model.policy.parameters())
    assert not part.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_a_second_learn_works_where_the_first_did_not_begin(name: str) -> None:
    """The same callback begins again, and counts from one."""
    model, callback = algorithm(name), GradtrackCallback(backends=["memory"])
    with pytest.raises(ZeroDivisionError):
        model.learn(64, callback=[callback, BrokenStart()])
    model.learn(64, callback=callback)
    assert len(callback.reports) > 3
    assert callback.reports[0].step == 1
    assert "_setup_learn" not in vars(model)


def test_the_manager_begins_with_the_training() -> None:
    """Before the training there are no reports, and the error says when there will be a manager."""
    callback = GradtrackCallback()
    assert callback.reports == []
    with pytest.raises(UsageError, match=r"expected a training that has begun\. Read it during or after"):
        _ = callback.manager


class WithoutOptimizer(stable_baselines3.A2C):  # type: ignore[misc]
    """An algorithm that moves its weights by itself, as evolution strategies do."""

    def _setup_model(self) -> None:
        super()._setup_model()
        del self.policy.optimizer

    def train(self) -> None:
        """Move the weights."""
        with torch.no_grad():
            for param in self.policy.parameters():
                param.mul_(0.99)


def test_an_algorithm_without_an_optimizer_learns(caplog: pytest.LogCaptureFixture) -> None:
    """The callback does nothing, and says so."""
    callback = GradtrackCallback()
    WithoutOptimizer("MlpPolicy", "CartPole-v1", device="cpu").learn(64, callback=callback)
    assert "WithoutOptimizer has no optimizer, and so no gradients: gradtrack does nothing." in caplog.text
    assert callback.reports == []


ARS = """
from sb3_contrib import ARS
from gradtrack.integrations.stable_baselines3 import GradtrackCallback
callback = GradtrackCallback()
ARS("LinearPolicy", "Pendulum-v1", n_delta=2, seed=0, device="cpu").learn(1000, callback=callback)
assert callback.reports == []
"""


@pytest.mark.slow
def test_ars_learns(tmp_path: Path) -> None:
    """So it does with the one of SB3's own algorithms that has none."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*install, "sb3_contrib==2.9.2"], check=True, timeout=300)
    found = os.pathsep.join((str(tmp_path), *sys.path))
    command, environment = [sys.executable, "-c", ARS], {**os.environ, "PYTHONPATH": found}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "ARS has no optimizer, and so no gradients: gradtrack does nothing." in done.stderr


def test_a_callback_is_pickled_after_its_training() -> None:
    """A copy has no manager, and begins a training of its own."""
    callback = GradtrackCallback()
    algorithm("A2C").learn(32, callback=callback)
    kept = {name: value for name, value in callback.__getstate__().items() if name.startswith("_")}
    assert kept["_manager"] is None
    assert not kept["_changes"]
