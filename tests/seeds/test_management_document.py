"""The code of the document on gradient management, run with only its imports changed."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradtrack import GradientConfig, GradientManager, create_gradient_manager, safe_backward
from gradtrack.integrations.training import (
    EarlyStoppingConfig,
    GradientManagementConfig,
    LRSchedulerConfig,
    TrainingHistory,
    TrainingOptimizer,
)
from tests.training import batch_loss, small_model

LOSSES = 3


def blocks(manager: GradientManager, *, bad: float = 1.0) -> dict[str, Any]:
    """Run the loop of the quick start and return its last information on a step."""
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(LOSSES):
        optimizer.zero_grad()
        loss = batch_loss(model, step) * (bad if step == LOSSES - 1 else 1.0)
        step_info = safe_backward(loss=loss, model=model, optimizer=optimizer, gradient_manager=manager)
        optimizer.step()
    return step_info  # type: ignore[return-value]


def test_basic_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """The quick start trains, and its check of the health prints on a bad step only."""
    for bad in (1.0, float("nan")):
        step_info = blocks(
            create_gradient_manager(max_grad_norm=1.0, enable_monitoring=True, enable_nan_inf_check=True), bad=bad
        )
        if not step_info["health"]["healthy"]:
            print("Gradient health issues detected!")
    assert capsys.readouterr().out == "Gradient health issues detected!\n"


def test_advanced_configuration() -> None:
    """Every field of the advanced configuration is taken, and the percentile wins over the type."""
    config = GradientConfig(
        enable_gradient_clipping=True,
        max_grad_norm=1.0,
        clip_type="norm",
        enable_nan_inf_check=True,
        replace_nan_with=0.0,
        replace_inf_with=1e6,
        enable_gradient_monitoring=True,
        verbose_logging=True,
        adaptive_clipping=True,
        adaptive_window_size=100,
        adaptive_percentile=95.0,
    )
    assert blocks(GradientManager(config))["clipping"]["clip_type"] == "adaptive"


@pytest.mark.parametrize(
    ("field", "default"),
    [
        ("enable_gradient_clipping", True),
        ("max_grad_norm", 1.0),
        ("clip_type", "norm"),
        ("enable_nan_inf_check", True),
        ("nan_inf_threshold", 1e-6),
        ("replace_nan_with", 0.0),
        ("replace_inf_with", 1e6),
        ("enable_gradient_monitoring", True),
        ("log_gradient_stats", True),
        ("save_gradient_plots", True),
        ("adaptive_clipping", False),
        ("adaptive_window_size", 100),
        ("adaptive_percentile", 95.0),
        ("debug_mode", False),
        ("verbose_logging", False),
    ],
)
def test_defaults(field: str, default: object) -> None:
    """The defaults are those of the document."""
    assert getattr(GradientConfig(), field) == default


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_type": "norm", "max_grad_norm": 1.0},
        {"clip_type": "value", "max_grad_norm": 1.0},
        {"adaptive_clipping": True, "adaptive_window_size": 100, "adaptive_percentile": 95.0},
    ],
)
def test_strategies(settings: dict[str, Any]) -> None:
    """Each strategy's block makes a manager that trains."""
    assert blocks(GradientManager(GradientConfig(**settings)))["health"]["healthy"]


def test_nonfinite_values(capsys: pytest.CaptureFixture[str]) -> None:
    """The block on NaN and Inf prints how many values it fixed."""
    gradient_manager = GradientManager(
        GradientConfig(enable_nan_inf_check=True, replace_nan_with=0.0, replace_inf_with=1e6)
    )
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    loss = batch_loss(model) * float("nan")
    step_info = gradient_manager.step(model, optimizer, loss)
    if step_info["nan_inf"]["nan_count"] > 0:
        print(f"Fixed {step_info['nan_inf']['nan_count']} NaN values")
    if step_info["nan_inf"]["inf_count"] > 0:
        print(f"Fixed {step_info['nan_inf']['inf_count']} Inf values")
    assert capsys.readouterr().out == "Fixed 53 NaN values\n"
    assert all(torch.isfinite(param.grad).all() for param in model.parameters() if param.grad is not None)


def test_parameter_check(capsys: pytest.CaptureFixture[str]) -> None:
    """The block on weights prints what was found."""
    gradient_manager, model = create_gradient_manager(), small_model()
    nn.init.constant_(model[2].bias, float("inf"))  # type: ignore[arg-type]
    nan_inf_info = gradient_manager.nan_inf_handler.check_and_fix_parameters(model=model, replace_values=True)
    print(f"Parameter check: {nan_inf_info}")
    assert "inf_count=3" in capsys.readouterr().out


def test_health_block(capsys: pytest.CaptureFixture[str]) -> None:
    """Warnings and recommendations are texts to print."""
    health = blocks(create_gradient_manager(), bad=float("inf"))["health"]
    if not health["healthy"]:
        print("Gradient health issues detected:")
        for warning in health["warnings"]:
            print(f"  - {warning}")
        for recommendation in health["recommendations"]:
            print(f"  Recommendation: {recommendation}")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("  Recommendation: ")


def test_statistics_block(capsys: pytest.CaptureFixture[str]) -> None:
    """The monitor's statistics print as the document formats them."""
    gradient_manager = create_gradient_manager()
    stats = gradient_manager.monitor.update_statistics([torch.tensor([3.0, 4.0])])
    print(f"Total gradient norm: {stats['total_norm']:.6f}")
    print(f"Gradient mean: {stats['mean']:.6f}")
    print(f"Gradient std: {stats['std']:.6f}")
    print(f"NaN count: {stats['nan_count']}")
    print(f"Inf count: {stats['inf_count']}")
    assert capsys.readouterr().out.splitlines()[:3] == [
        "Total gradient norm: 5.000000",
        "Gradient mean: 3.500000",
        "Gradient std: 0.707107",
    ]


def test_summary_block(capsys: pytest.CaptureFixture[str]) -> None:
    """The summary's keys are those that the document prints."""
    gradient_manager = create_gradient_manager()
    blocks(gradient_manager)
    summary = gradient_manager.get_training_summary()
    print(f"Total steps: {summary['total_steps']}")
    print(f"Average gradient norm: {summary['gradient_statistics']['gradient_norms']['mean']:.6f}")
    print(f"Health issues: {summary['health_issues']['unhealthy_steps']}")
    print(f"NaN/Inf replacements: {summary['nan_inf_summary']['total_replacements']}")
    assert capsys.readouterr().out.startswith(f"Total steps: {LOSSES}\nAverage gradient norm: 0.")


def test_logging_block(caplog: pytest.LogCaptureFixture) -> None:
    """With logging switched on a verbose manager tells about its steps."""
    caplog.set_level(logging.DEBUG)
    blocks(create_gradient_manager(verbose=True, grad_log_every_n_steps=1))
    assert "gradient norm" in caplog.text
    blocks(GradientManager(GradientConfig(debug_mode=True, verbose_logging=True)))


def test_best_practices() -> None:
    """Settings change while the manager exists, in the document's own words."""
    config = GradientConfig(
        max_grad_norm=1.0,
        enable_gradient_clipping=True,
        enable_nan_inf_check=True,
        enable_gradient_monitoring=True,
        verbose_logging=True,
    )
    gradient_manager = GradientManager(config)
    blocks(gradient_manager, bad=float("nan"))
    summary = gradient_manager.get_training_summary()
    if summary["health_issues"]["unhealthy_steps"] > 0:
        config.max_grad_norm *= 0.5
    config.adaptive_clipping = True
    config.adaptive_window_size = 50
    config.adaptive_percentile = 90.0
    assert gradient_manager.config.max_grad_norm == 0.5
    assert gradient_manager.config.effective_clip_type == "adaptive"


def test_components_and_log(tmp_path: Path) -> None:
    """The three components are reached as the document reaches them, and the log is a file."""
    manager = create_gradient_manager(max_grad_norm=0.5)
    model = small_model()
    torch.autograd.backward(batch_loss(model))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert manager.monitor.check_gradient_health(gradients)["healthy"]
    assert manager.nan_inf_handler.check_and_fix_gradients(model)["nan_count"] == 0
    assert manager.clipper.clip_gradients(model)["norm_after"] <= 0.5
    blocks(manager)
    manager.save_training_log(file_path=str(tmp_path / "log.json"))
    assert json.loads((tmp_path / "log.json").read_text())["summary"]["total_steps"] == LOSSES


def test_pictures(tmp_path: Path) -> None:
    """Both pictures are drawn where the document asks for them."""
    gradient_manager = create_gradient_manager()
    blocks(gradient_manager)
    gradient_manager.plot_training_curves(save_path=str(tmp_path / "training_curves.png"))
    gradient_manager.monitor.plot_gradient_statistics(save_path=str(tmp_path / "gradient_stats.png"))
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("training_curves.png", "gradient_stats.png"))


def test_integrated_training_block() -> None:
    """The block on the training optimizer trains every epoch and returns the history."""
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())

    def train_func(model: nn.Module, optimizer: torch.optim.Optimizer, manager: GradientManager) -> torch.Tensor:
        optimizer.zero_grad()
        loss = batch_loss(model)
        safe_backward(loss, model, optimizer, manager)
        optimizer.step()
        return loss

    def val_func(model: nn.Module) -> torch.Tensor:
        return batch_loss(model, 1)

    async def block() -> TrainingHistory:
        early_stopping_config = EarlyStoppingConfig(patience=10)
        lr_scheduler_config = LRSchedulerConfig(scheduler_type="cosine")
        gradient_config = GradientManagementConfig(
            enable_gradient_management=True, max_grad_norm=1.0, enable_nan_inf_check=True
        )
        training_optimizer = TrainingOptimizer(
            early_stopping_config=early_stopping_config,
            lr_scheduler_config=lr_scheduler_config,
            gradient_config=gradient_config,
            optimizer=optimizer,
        )
        return await training_optimizer.optimize_training(
            model=model, train_func=train_func, val_func=val_func, max_epochs=100
        )

    training_history = asyncio.run(block())
    losses = training_history.column("loss")
    assert len(losses) == 100
    assert losses[-1] < losses[0]
