"""Seven short examples of managing gradients; give a name to run one of them.

python examples/gradient_management_example.py [name]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradtrack import GradientConfig, GradientManager, StepReport, create_gradient_manager, safe_backward
from gradtrack.integrations.training import (
    EarlyStoppingConfig,
    GradientManagementConfig,
    LRSchedulerConfig,
    TrainingHistory,
    TrainingOptimizer,
)


def a_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def a_loss(model: nn.Module, scale: float = 1.0) -> Tensor:
    x = torch.randn(32, 10)
    loss: Tensor = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    return scale * loss


def train(manager: GradientManager, steps: int = 30, scale: Callable[[int], float] = lambda step: 1.0) -> StepReport:
    model, optimizer = a_model()
    for step in range(steps):
        optimizer.zero_grad()
        report = safe_backward(a_loss(model, scale(step)), model, optimizer, manager)
        optimizer.step()
    return report


def basic_clipping() -> GradientManager:
    manager = create_gradient_manager(max_grad_norm=0.5)
    clipping = train(manager).clipping
    print(f"norm {clipping.norm_before:.3f} -> {clipping.norm_after:.3f}, clipped on {clipping.clip_rate:.0%} of steps")
    return manager


def nan_inf_handling() -> GradientManager:
    manager = GradientManager(nonfinite_action="skip")
    train(manager, scale=lambda step: float("nan") if step == 10 else 1.0)
    bad = manager.reports[10]
    print(f"step {bad.step}: {bad.nan_inf.nan_count} NaN, {bad.nan_inf.action}; the worst: {bad.nan_inf.parameters[0]}")
    return manager


def adaptive_clipping() -> GradientManager:
    manager = GradientManager(adaptive_clipping=True, adaptive_window_size=20, adaptive_percentile=90.0)
    train(manager, scale=lambda step: 100.0 if step == 25 else 1.0)
    spike = manager.reports[25].clipping
    print(f"a spike of {spike.norm_before:.1f} was clipped to the percentile {spike.threshold:.3f}")
    return manager


def health_monitoring() -> GradientManager:
    manager = create_gradient_manager()
    manager.on_issue(lambda issue, report: print(f"step {report.step}: {issue}"))
    train(manager, scale=lambda step: float("inf") if step == 20 else 1.0)
    print(f"unhealthy steps: {manager.get_training_summary()['health_issues']['unhealthy_steps']}")
    return manager


def integrated_training() -> TrainingHistory:
    model, optimizer = a_model()

    def train_func(model: nn.Module, optimizer: Any, manager: GradientManager) -> Tensor:
        optimizer.zero_grad()
        loss = a_loss(model)
        safe_backward(loss, model, optimizer, manager)
        optimizer.step()
        return loss

    trainer = TrainingOptimizer(
        early_stopping_config=EarlyStoppingConfig(patience=10),
        lr_scheduler_config=LRSchedulerConfig(scheduler_type="cosine"),
        gradient_config=GradientManagementConfig(max_grad_norm=1.0),
        optimizer=optimizer,
    )
    history = asyncio.run(trainer.optimize_training(model=model, train_func=train_func, val_func=a_loss, max_epochs=40))
    print(f"best epoch {history.best_epoch} with loss {history.best_value:.4f}")
    return history


def visualization() -> GradientManager:
    manager = GradientManager(GradientConfig(max_grad_norm=1.0))
    train(manager)
    print(manager.plot_training_curves(save_path="training_curves.png"))
    print(manager.monitor.plot_gradient_statistics(save_path="gradient_stats.png"))
    return manager


def safe_backward_utility() -> StepReport:
    model, optimizer = a_model()
    report = safe_backward(loss=a_loss(model), model=model, optimizer=optimizer)
    optimizer.step()
    print(report.clipping)
    return report


EXAMPLES: dict[str, Callable[[], object]] = {
    found.__name__: found
    for found in (
        basic_clipping,
        nan_inf_handling,
        adaptive_clipping,
        health_monitoring,
        integrated_training,
        visualization,
        safe_backward_utility,
    )
}

if __name__ == "__main__":
    for name in sys.argv[1:] or EXAMPLES:
        print(f"--- {name}")
        EXAMPLES[name]()
