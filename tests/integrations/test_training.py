"""The training loop: early stopping, schedules, gradients through the manager."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradtrack import GradientManager, safe_backward
from gradtrack.errors import ConfigError, InputTypeError, UsageError
from gradtrack.integrations.training import (
    EarlyStoppingConfig,
    GradientManagementConfig,
    LRSchedulerConfig,
    TrainingHistory,
    TrainingOptimizer,
)
from tests.training import batch_loss, optimizer_of, small_model


def train_epoch(model: nn.Module, optimizer: Any, manager: GradientManager) -> float:
    """Train for two steps."""
    for step in range(2):
        optimizer.zero_grad()
        loss = batch_loss(model, step)
        safe_backward(loss, model, optimizer, manager)
        optimizer.step()
    return float(loss.detach())


async def train_epoch_async(model: nn.Module, optimizer: Any, manager: GradientManager) -> dict[str, float]:
    """Train for two steps between other coroutines."""
    await asyncio.sleep(0)
    return {"loss": train_epoch(model, optimizer, manager)}


def replay(values: list[float]) -> Callable[[nn.Module], float]:
    """Return a validation that gives these values, one per epoch."""
    rest = iter(values)
    return lambda model: next(rest)


def run(epochs: int = 3, model: nn.Module | None = None, **settings: Any) -> tuple[TrainingHistory, TrainingOptimizer]:
    """Train a small model and return the history and what trained it."""
    model = model or small_model()
    train_func = settings.pop("train_func", train_epoch)
    val_func = settings.pop("val_func", lambda model: batch_loss(model))
    trainer = TrainingOptimizer(optimizer=optimizer_of(model), **settings)
    history = asyncio.run(trainer.optimize_training(model, train_func, val_func, epochs))
    return history, trainer


@pytest.mark.parametrize("train_func", [train_epoch, train_epoch_async])
def test_every_step_goes_through_the_manager(train_func: Any) -> None:
    """One report per optimizer step, whether the functions are plain or async, and the loss falls."""
    history, trainer = run(epochs=3, train_func=train_func)
    assert [report.step for report in trainer.reports] == [1, 2, 3, 4, 5, 6]
    assert history.gradients.total_steps == 6
    losses = history.column("loss", "train")
    assert losses[2] < losses[0]


def test_clipping_is_that_of_the_configuration() -> None:
    """The limit of the gradient configuration is the one in the reports."""
    _, trainer = run(gradient_config=GradientManagementConfig(max_grad_norm=1e-3))
    assert all(report.clipping.clipped for report in trainer.reports)
    assert trainer.reports[0].clipping.norm_after == pytest.approx(1e-3, rel=1e-3)


def test_management_can_be_switched_off() -> None:
    """Without management the training is bitwise that of a plain loop."""
    managed, plain = small_model(), small_model()
    config = GradientManagementConfig(enable_gradient_management=False, max_grad_norm=1e-3)
    run(epochs=1, model=managed, gradient_config=config)
    optimizer = optimizer_of(plain)
    for step in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(batch_loss(plain, step))
        optimizer.step()
    assert all(torch.equal(one, two) for one, two in zip(managed.parameters(), plain.parameters(), strict=True))


def test_training_stops_after_patience_epochs_without_improvement() -> None:
    """A smaller improvement than `min_delta` is none, and a NaN never is one."""
    values = [1.0, 0.5, 0.45, math.nan, 0.44, 0.1]
    history, _ = run(
        epochs=6, val_func=replay(values), early_stopping_config=EarlyStoppingConfig(patience=3, min_delta=0.1)
    )
    assert (history.stopped_early, len(history.epochs), history.best_epoch) == (True, 5, 1)
    assert history.best_value == 0.5


def test_a_metric_can_be_maximised() -> None:
    """With mode max the largest value is the best."""
    history, _ = run(
        epochs=3,
        val_func=lambda model: {"accuracy": 0.7},
        early_stopping_config=EarlyStoppingConfig(patience=2, monitor="accuracy", mode="max"),
    )
    assert (history.best_epoch, history.best_value, history.stopped_early) == (0, 0.7, True)


def test_the_best_weights_come_back_on_request() -> None:
    """The weights at the end are those of the best epoch."""
    model = small_model()
    kept: list[torch.Tensor] = []

    def judge(model: nn.Module) -> float:
        kept.append(next(model.parameters()).detach().clone())
        return float(len(kept))

    run(model=model, val_func=judge, early_stopping_config=EarlyStoppingConfig(restore_best_weights=True))
    assert torch.equal(next(model.parameters()), kept[0])
    assert not torch.equal(kept[0], kept[-1])


@pytest.mark.parametrize("kind", ["none", "cosine", "linear", "step", "exponential", "plateau"])
def test_schedules_are_those_of_torch(kind: Any) -> None:
    """The rates over the epochs are those that torch's own scheduler gives."""
    config = LRSchedulerConfig(scheduler_type=kind, gamma=0.5, step_size=2, patience=0)
    history, _ = run(epochs=4, val_func=replay([1.0, 2.0, 3.0, 4.0]), lr_scheduler_config=config)
    expected = {
        "none": [0.1, 0.1, 0.1, 0.1],
        "cosine": [0.05 * (1 + math.cos(math.pi * epoch / 4)) for epoch in range(4)],
        "linear": [0.1 * (1 - 0.5 * epoch / 4) for epoch in range(4)],
        "step": [0.1, 0.1, 0.05, 0.05],
        "exponential": [0.1, 0.05, 0.025, 0.0125],
        "plateau": [0.1, 0.1, 0.05, 0.025],
    }
    assert [epoch.lr[0] for epoch in history.epochs] == pytest.approx(expected[kind])


@pytest.mark.parametrize(("values", "rates"), [([0.1, 0.2, 0.3], [0.1, 0.1, 0.1]), ([0.3, 0.2, 0.1], [0.1, 0.1, 0.05])])
def test_a_plateau_is_one_of_what_is_maximised(values: list[float], rates: list[float]) -> None:
    """With mode max a growing metric keeps the rate, and a falling one halves it."""
    history, _ = run(
        val_func=replay(values),
        early_stopping_config=EarlyStoppingConfig(mode="max"),
        lr_scheduler_config=LRSchedulerConfig(scheduler_type="plateau", gamma=0.5, patience=0),
    )
    assert [epoch.lr[0] for epoch in history.epochs] == pytest.approx(rates)


def test_a_group_without_a_rate_trains() -> None:
    """As Adafactor's default, None, by which it finds its own."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    training = TrainingOptimizer(optimizer=optimizer)

    def measure(model: nn.Module, optimizer: Any, manager: GradientManager) -> float:
        return manager.step(model, optimizer, batch_loss(model)).loss or 0.0

    history = asyncio.run(training.optimize_training(model, measure, max_epochs=2))
    assert all(math.isnan(rate) for epoch in history.epochs for rate in epoch.lr)


def test_validation_runs_in_evaluation_mode_without_gradients() -> None:
    """The model is back in training mode in the next epoch."""
    modes: list[tuple[bool, bool]] = []

    def judge(model: nn.Module) -> float:
        modes.append((model.training, torch.is_grad_enabled()))
        return 1.0

    model = small_model()
    run(epochs=2, model=model, val_func=judge)
    assert modes == [(False, False), (False, False)]
    assert model.training


def test_the_history_survives_json() -> None:
    """Epochs, best epoch and the summary of the gradients are the same after a round trip."""
    history, _ = run()
    again = TrainingHistory.model_validate_json(history.model_dump_json())
    assert again == history
    assert history["epochs"][2]["train"]["loss"] == history.column("loss", "train")[2]


def test_an_error_in_the_users_function_ends_the_run_as_failed() -> None:
    """The manager is closed as failed, and the error arrives."""

    def broken(model: nn.Module, optimizer: Any, manager: GradientManager) -> float:
        train_epoch(model, optimizer, manager)
        raise RuntimeError("no more data")

    model = small_model()
    config = GradientManagementConfig(backends=["memory"])
    trainer = TrainingOptimizer(gradient_config=config, optimizer=optimizer_of(model))
    with pytest.raises(RuntimeError, match="no more data"):
        asyncio.run(trainer.optimize_training(model=model, train_func=broken))
    assert trainer.manager.backend("memory").failed  # type: ignore[attr-defined]


def test_a_second_training_starts_anew() -> None:
    """The same trainer can train again, with a new manager."""
    model = small_model()
    trainer = TrainingOptimizer(optimizer=optimizer_of(model))
    for _ in range(2):
        history = asyncio.run(trainer.optimize_training(model=model, train_func=train_epoch, max_epochs=1))
        assert history.gradients.total_steps == 2


def test_a_function_that_passes_the_manager_by_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    """A training whose gradients never reach the manager logs that once."""
    run(epochs=2, train_func=lambda model, optimizer, manager: 1.0)
    assert [record.message for record in caplog.records if "showed no gradients" in record.message] != []
    assert len(caplog.records) == 1


def test_unusable_values_name_the_remedy() -> None:
    """A result that is no number, a metric that is not there, and no epochs are refused."""
    with pytest.raises(InputTypeError, match=r"train_func returned 'low': expected a loss"):
        run(train_func=lambda *_: "low")
    with pytest.raises(UsageError, match=r"'f1': expected one of loss\. Return it from val_func"):
        run(early_stopping_config=EarlyStoppingConfig(monitor="f1"))
    for epochs in (0, 2.5):
        with pytest.raises(UsageError, match=f"max_epochs {epochs}: expected a number of epochs, at least 1"):
            run(epochs=epochs)  # type: ignore[arg-type]


def test_unusable_settings_name_the_remedy() -> None:
    """A typo, a value out of range, and what is no configuration are refused in one line."""
    with pytest.raises(ConfigError, match="Did you mean 'max_grad_norm'"):
        GradientManagementConfig(max_gradnorm=1.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^unknown setting 'patence': .* Did you mean 'patience'\?$"):
        EarlyStoppingConfig(patence=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^scheduler_type = 'cosin': expected 'none', 'cosine', 'linear'"):
        LRSchedulerConfig(scheduler_type="cosin")
    with pytest.raises(InputTypeError, match=r"5: expected EarlyStoppingConfig\(\.\.\.\) or a mapping"):
        run(early_stopping_config=5)
    with pytest.raises(InputTypeError, match="optimizer 3: expected an optimizer of torch"):
        TrainingOptimizer(optimizer=3)  # type: ignore[arg-type]


def test_functions_that_cannot_be_called_are_refused_at_once() -> None:
    """What is no function, or takes other arguments, is named before an epoch is spent."""
    with pytest.raises(InputTypeError, match=r"train_func 5: expected a function of \(model, optimizer, gradient_man"):
        run(train_func=5)
    with pytest.raises(InputTypeError, match=r"val_func <function .* expected a function of \(model\), but missing a"):
        run(val_func=lambda model, more: 1.0)


def test_settings_may_be_mappings() -> None:
    """What comes from a file of settings needs no classes."""
    history, trainer = run(
        epochs=4,
        val_func=replay([1.0, 2.0, 3.0]),
        early_stopping_config={"patience": 2},
        lr_scheduler_config={"scheduler_type": "exponential", "gamma": 0.5},
        gradient_config={"max_grad_norm": 1e-3, "enable_gradient_management": True},
    )
    assert [epoch.lr[0] for epoch in history.epochs] == pytest.approx([0.1, 0.05, 0.025])
    assert trainer.reports[0].clipping.threshold == 1e-3
