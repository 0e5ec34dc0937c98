"""A callback for the algorithms of Stable-Baselines3."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import fmean
from typing import Any, ClassVar, Final, Unpack, final

import torch
from torch import nn

from gradtrack import registry
from gradtrack.backends.base import Backend
from gradtrack.config import GradientConfig
from gradtrack.errors import MissingExtraError, UsageError
from gradtrack.integrations.callback import ManagedTraining, Source, clipping_if_asked
from gradtrack.integrations.patching import AfterBackward, embrace, stand_in
from gradtrack.records import Record, tail_of
from gradtrack.step.arguments import AllSettings
from gradtrack.step.pair import IssueCallback

try:
    from stable_baselines3.common.callbacks import BaseCallback
except ImportError as fault:
    raise MissingExtraError("the callback for Stable-Baselines3", "stable-baselines3", "sb3") from fault

_logger = logging.getLogger("gradtrack")
# What `learn` calls; an exception out of one ends the training without a word to the callbacks.
_PARTS: Final = ("collect_rollouts", "train", "dump_logs")


class GradtrackCallback(ManagedTraining, BaseCallback):  # type: ignore[misc]
    """Reports on the gradients of every optimizer step of an algorithm, and on the policy where it has a distribution.

    Where the algorithm clips (PPO, A2C, DQN), gradtrack looks before that and only measures; elsewhere (SAC, TD3) it
    clips where a setting asks for that. Actor and critic have names and counts of their own. A learning that goes on
    (`reset_num_timesteps=False`) counts on, also in a model that was loaded and with a callback that is new. Without
    `backends` the rows go to the algorithm's own logger; without `analyzers` the policy of PPO, A2C and SAC is looked
    at.
    """

    _begins_with = "model.learn()"

    def __init__(
        self,
        config: Source = None,
        *,
        on_issue: IssueCallback | None = None,
        verbose: int = 0,
        **settings: Unpack[AllSettings],
    ) -> None:
        super().__init__(verbose)
        self._prepare(GradientConfig.load(config, **settings), on_issue)

    def _on_training_start(self) -> None:
        self._stop()
        if not _pairs(self.model):
            self._manager = None
            _logger.warning(
                "%s has no optimizer, and so no gradients: gradtrack does nothing.", type(self.model).__name__
            )
            return
        before = None if self._manager is None else self._manager.state_dict(checkpoint=False)
        clips = ""
        if hasattr(self.model, "max_grad_norm"):
            clips = f"{type(self.model).__name__} clips at max_grad_norm {self.model.max_grad_norm}"
        with self._failing():
            manager = self._begin(self._effective(clips), before)
            for name, module, optimizer in _pairs(self.model):
                manager.attach(module, optimizer, name=name or None)
                if before is None and self.model.num_timesteps:
                    # What an optimizer counts of its own, with the steps before its model was saved.
                    made = max((int(state.get("step", 0)) for state in optimizer.state.values()), default=0)
                    manager.continue_from(made, name=name)
                self._watch(module, optimizer, clips=bool(clips))
                if clips:
                    manager.note(f"{clips}; gradtrack only measures, before it clips.", name=name)
            self._watch_policy(self.model.policy)
            self._watch_algorithm(self.model)

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        with self._failing():
            self._stop()

    def _effective(self, clips: str) -> GradientConfig:
        config = clipping_if_asked(self._config, clips=clips)
        given = config.model_fields_set
        defaults: dict[str, Any] = {}
        if "backends" not in given:
            defaults["backends"] = [_LoggerBackend(self.model.logger)]
        if "analyzers" not in given and _watched_call(self.model.policy) is not None:
            defaults["analyzers"] = _observers()
        return GradientConfig.load(config, **defaults)

    def _watch_algorithm(self, model: Any) -> None:
        """Watch for exceptions that end the training, and for a new training that begins before this one did."""
        parts = [*self._embrace(model, _PARTS), "_setup_learn", "_excluded_save_params"]
        embrace(self._changes, model, "_setup_learn", self._before_another)
        excluded = model._excluded_save_params

        # A model is saved with everything that is set on it, and ours is nothing to save.
        def excluded_and_ours() -> list[str]:
            return [*excluded(), *parts]

        stand_in(self._changes, model, "_excluded_save_params", excluded_and_ours)

    @contextmanager
    def _before_another(self) -> Iterator[None]:
        self._stop(failed=True)
        yield

    def _watch(self, module: nn.Module, optimizer: Any, *, clips: bool) -> None:
        manager = self.manager

        def look(*_: object) -> None:
            if self._awake:
                with self._failing():
                    manager.step(module, optimizer, None, backward=False)

        if clips:
            AfterBackward(module.parameters(), look, self._changes)
        else:
            self._changes.hook(optimizer.register_step_pre_hook, look)

    def _watch_policy(self, policy: Any) -> None:
        """Show the analyzer, where there is one, the distributions that the update itself computes."""
        watched = _watched_call(policy)
        analyzer: Any = None
        for observer in _observers() if watched is not None else ():
            with suppress(UsageError):
                analyzer = self.manager.analyzer(observer)
        if watched is None or analyzer is None:
            return
        owner, name = watched
        compute = getattr(owner, name)

        def compute_and_show(*arguments: Any, **keywords: Any) -> Any:
            found = compute(*arguments, **keywords)
            if self._awake and owner.training and torch.is_grad_enabled():
                recent = [float(episode["r"]) for episode in self.model.ep_info_buffer or ()]
                analyzer.observe(owner.action_dist, episode_return=fmean(recent) if recent else None)
            return found

        stand_in(self._changes, owner, name, compute_and_show)


@final
class _LoggerBackend(Backend):
    """The algorithm's own logger, which keeps the last row until the algorithm writes its own."""

    inline: ClassVar[bool] = True
    name = "stable_baselines3"

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def write(self, records: Sequence[Record]) -> None:
        """Record metrics; those of groups not on the screen, whose narrow column refuses names that are cut alike."""
        for record in records:
            tail = tail_of(record.source)
            for name, value in record.metrics.items():
                narrow = name.removesuffix(tail).count("/") == 1
                self._logger.record(name, value, exclude=None if narrow else ("stdout", "log"))
            self._logger.record(f"gradtrack/step{tail}", record.step)


def _pairs(model: Any) -> list[tuple[str, nn.Module, Any]]:
    """Return name, module and optimizer of everything that the algorithm steps."""
    policy = model.policy
    parts = [
        (name, getattr(policy, name))
        for name in ("actor", "critic")
        if isinstance(getattr(getattr(policy, name, None), "optimizer", None), torch.optim.Optimizer)
    ]
    if parts:
        return [(name, part, part.optimizer) for name, part in parts]
    optimizer = getattr(policy, "optimizer", None)  # an evolution strategy, such as ARS, has none
    return [] if optimizer is None else [("", getattr(policy, "q_net", policy), optimizer)]


def _watched_call(policy: Any) -> tuple[Any, str] | None:
    """Return the module and its method that compute `action_dist` in an update, where the policy has one."""
    for owner, name in ((policy, "_get_action_dist_from_latent"), (getattr(policy, "actor", None), "action_log_prob")):
        if hasattr(owner, name) and hasattr(owner, "action_dist"):
            return owner, name
    return None


def _observers() -> list[str]:
    """Name the analyzers to which the distributions of a policy's actions can be shown."""
    return [name for name in registry.analyzers.builtin() if registry.analyzers.load(name).observes_actions]
