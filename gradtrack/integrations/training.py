"""A small training loop over epochs: early stopping, a schedule of torch's own, and gradients through a manager."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.optim import lr_scheduler

from gradtrack import registry
from gradtrack.config import GradientConfig, readable
from gradtrack.errors import ConfigError, InputTypeError, UsageError
from gradtrack.manager import GradientManager
from gradtrack.reports import Report, StepReport, TrainingSummary

Result = float | Tensor | Mapping[str, float | Tensor]
TrainFunction = Callable[[nn.Module, Any, GradientManager], Result | Awaitable[Result]]
ValidationFunction = Callable[[nn.Module], Result | Awaitable[Result]]
_logger = logging.getLogger("gradtrack")
_Kind = TypeVar("_Kind", bound="_Settings")


class _Settings(BaseModel):
    """Base of the settings below; a wrong value raises an error of one line that says what was expected."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **values: Any) -> None:
        for name in values.keys() - type(self).model_fields.keys():
            close = registry.nearest(name, type(self).model_fields)
            raise ConfigError(f"unknown setting {name!r}: expected a field of {type(self).__name__}.{close}")
        try:
            super().__init__(**values)
        except ValidationError as fault:
            raise readable(fault) from None


class EarlyStoppingConfig(_Settings):
    """When to stop: after `patience` epochs without an improvement by more than `min_delta`."""

    patience: int = Field(10, ge=1)
    min_delta: float = Field(0.0, ge=0)
    monitor: str = "loss"
    mode: Literal["min", "max"] = "min"
    restore_best_weights: bool = False


class LRSchedulerConfig(_Settings):
    """Which of torch's schedules to follow, once per epoch; `cosine` and `linear` end with the last epoch.

    `plateau` judges what early stopping monitors, by its `mode`.
    """

    scheduler_type: Literal["none", "cosine", "linear", "step", "exponential", "plateau"] = "cosine"
    min_lr: float = Field(0.0, ge=0)
    gamma: float = Field(0.1, gt=0)
    step_size: int = Field(30, ge=1)
    patience: int = Field(5, ge=0)


class GradientManagementConfig(GradientConfig):
    """Every setting of `GradientConfig`, and a switch that turns all of its parts off."""

    enable_gradient_management: bool = Field(True, description="Measure and protect gradients; off does neither.")


class EpochReport(Report):
    """The metrics of one epoch, and the rates at its beginning; NaN is that of a group without one."""

    epoch: int
    train: dict[str, float]
    validation: dict[str, float]
    lr: list[float]


class TrainingHistory(Report):
    """A finished training: its epochs, the best of them by the monitored metric, and a summary of the gradients."""

    epochs: list[EpochReport] = Field(default_factory=list)
    monitor: str = "loss"
    best_epoch: int | None = None
    best_value: float | None = None
    stopped_early: bool = False
    gradients: TrainingSummary

    def column(self, name: str, part: Literal["train", "validation"] = "validation") -> list[float]:
        """Return one metric over the epochs; NaN stands where an epoch did not have it."""
        return [epoch[part].get(name, math.nan) for epoch in self.epochs]


class TrainingOptimizer:
    """Trains a model epoch by epoch with an optimizer of the user's; its gradients go through `manager`.

    Without a configuration there is no early stopping, no schedule, or the default management of gradients. A mapping
    of settings does as well.
    """

    def __init__(
        self,
        *,
        early_stopping_config: EarlyStoppingConfig | Mapping[str, Any] | None = None,
        lr_scheduler_config: LRSchedulerConfig | Mapping[str, Any] | None = None,
        gradient_config: GradientConfig | Mapping[str, Any] | None = None,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputTypeError(
                f"optimizer {optimizer!r}: expected an optimizer of torch. Pass torch.optim.Adam(...)."
            )
        self._stopping = _settings(early_stopping_config, EarlyStoppingConfig)
        self._schedule = _settings(lr_scheduler_config, LRSchedulerConfig)
        config = gradient_config
        if not isinstance(config, GradientConfig):
            config = GradientManagementConfig.load(config)
        if isinstance(config, GradientManagementConfig) and not config.enable_gradient_management:
            parts = ("enable_gradient_clipping", "enable_nan_inf_check", "enable_gradient_monitoring")
            config = GradientConfig(**dict.fromkeys(parts, False))
        self._gradients = config
        self.optimizer = optimizer
        self.manager = GradientManager(self._gradients)

    @property
    def reports(self) -> list[StepReport]:
        """Return the last reports of the manager, the newest last."""
        return self.manager.reports

    async def optimize_training(
        self,
        model: nn.Module,
        train_func: TrainFunction,
        val_func: ValidationFunction | None = None,
        max_epochs: int = 100,
    ) -> TrainingHistory:
        """Train until the last epoch or until early stopping.

        `train_func(model, optimizer, gradient_manager)` trains for one epoch and passes the manager to `safe_backward`;
        `val_func(model)` judges the model, without gradients. Both are plain or async, and return a loss or a mapping
        of metrics. Without `val_func` the metrics of the training are monitored.
        """
        if type(max_epochs) is not int or max_epochs < 1:
            raise UsageError(f"max_epochs {max_epochs!r}: expected a number of epochs, at least 1.")
        _check_call(train_func, "train_func", ("model", "optimizer", "gradient_manager"))
        if val_func is not None:
            _check_call(val_func, "val_func", ("model",))
        if self.manager.status()["closed"]:
            self.manager = GradientManager(self._gradients)
        run = _Run(model, self.optimizer, self.manager, self._stopping or EarlyStoppingConfig(patience=max_epochs))
        advance = _schedule(self._schedule, self.optimizer, max_epochs, run.rule.mode)
        with self.manager:
            for epoch in range(max_epochs):
                value = await run.epoch(epoch, train_func, val_func)
                if run.stopped:
                    break
                advance(value)
            return run.finish()


@dataclass
class _Run:
    """One training under way."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    manager: GradientManager
    rule: EarlyStoppingConfig
    epochs: list[EpochReport] = field(default_factory=list)
    best_epoch: int | None = None
    best_value: float | None = None
    best_weights: dict[str, Any] | None = None
    stopped: bool = False

    async def epoch(self, epoch: int, train_func: TrainFunction, val_func: ValidationFunction | None) -> float:
        """Train and judge for one epoch, and return the value that is monitored."""
        self.model.train()
        rates = [_rate(group) for group in self.optimizer.param_groups]
        train = await _metrics(train_func(self.model, self.optimizer, self.manager), "train_func")
        if epoch == 0 and not self.manager.reports:
            _logger.warning(
                "train_func showed no gradients to the manager; call safe_backward(loss, model, optimizer, "
                "gradient_manager) in it"
            )
        validation: dict[str, float] = {}
        if val_func is not None:
            self.model.eval()
            try:
                # A coroutine has to switch gradients off by itself: whether they are on belongs to the thread, so it
                # must not be changed while others run between its steps.
                with torch.no_grad():
                    outcome = val_func(self.model)
                validation = await _metrics(outcome, "val_func")
            finally:
                self.model.train()
        self.epochs.append(EpochReport(epoch=epoch, train=train, validation=validation, lr=rates))
        judged = train if val_func is None else validation
        if self.rule.monitor not in judged:
            raise UsageError(
                f"monitored metric {self.rule.monitor!r}: expected one of {', '.join(judged) or 'none'}. "
                "Return it from val_func, or set EarlyStoppingConfig(monitor=...)."
            )
        value = judged[self.rule.monitor]
        sign = 1.0 if self.rule.mode == "min" else -1.0
        best = math.inf if self.best_value is None else sign * self.best_value - self.rule.min_delta
        if sign * value < best:  # which a NaN never is
            self.best_epoch, self.best_value = epoch, value
            if self.rule.restore_best_weights:
                self.best_weights = copy.deepcopy(self.model.state_dict())
        self.stopped = epoch - (-1 if self.best_epoch is None else self.best_epoch) >= self.rule.patience
        return value

    def finish(self) -> TrainingHistory:
        """Return the history, with the best weights back in the model where that was asked for."""
        if self.best_weights is not None:
            self.model.load_state_dict(self.best_weights)
        return TrainingHistory(
            epochs=self.epochs,
            monitor=self.rule.monitor,
            best_epoch=self.best_epoch,
            best_value=self.best_value,
            stopped_early=self.stopped,
            gradients=self.manager.get_training_summary(),
        )


def _rate(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a group; NaN for an optimizer such as Adafactor, which may find its own."""
    rate = group.get("lr")
    return math.nan if rate is None else float(rate)


def _settings(given: Any, kind: type[_Kind]) -> _Kind | None:
    """Return settings from an instance, a mapping or None."""
    if given is None or isinstance(given, kind):
        return given
    if isinstance(given, Mapping):
        return kind(**given)
    raise InputTypeError(f"{given!r}: expected {kind.__name__}(...) or a mapping of its settings.")


def _check_call(function: object, name: str, arguments: tuple[str, ...]) -> None:
    """Check that a function accepts these arguments before an epoch is spent on it."""
    try:
        inspect.signature(function).bind(*arguments)  # type: ignore[arg-type]
    except ValueError:
        return  # something built in, which does not say how it is called
    except TypeError as fault:
        raise InputTypeError(
            f"{name} {function!r}: expected a function of ({', '.join(arguments)}), but {fault}."
        ) from None


def _schedule(
    config: LRSchedulerConfig | None, optimizer: torch.optim.Optimizer, epochs: int, mode: Literal["min", "max"]
) -> Callable[[float], object]:
    """Return what advances the schedule after an epoch with this value."""
    if config is None or config.scheduler_type == "none":
        return lambda _: None
    if config.scheduler_type == "plateau":
        return lr_scheduler.ReduceLROnPlateau(
            optimizer, mode=mode, factor=config.gamma, patience=config.patience, min_lr=config.min_lr
        ).step
    scheduler: lr_scheduler.LRScheduler
    if config.scheduler_type == "cosine":
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs, eta_min=config.min_lr)
    elif config.scheduler_type == "linear":
        scheduler = lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=config.gamma, total_iters=epochs)
    elif config.scheduler_type == "step":
        scheduler = lr_scheduler.StepLR(optimizer, step_size=config.step_size, gamma=config.gamma)
    else:
        scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=config.gamma)
    return lambda _: scheduler.step()


async def _metrics(outcome: Any, source: str) -> dict[str, float]:
    result = await outcome if inspect.isawaitable(outcome) else outcome
    values = result if isinstance(result, Mapping) else {"loss": result}
    try:
        return {
            str(name): float(value.detach() if isinstance(value, Tensor) else value) for name, value in values.items()
        }
    except (TypeError, ValueError, RuntimeError):
        raise InputTypeError(
            f"{source} returned {result!r}: expected a loss or a mapping of numbers. Return the epoch's mean loss."
        ) from None
