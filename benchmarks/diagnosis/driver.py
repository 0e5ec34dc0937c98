"""Runs a scenario under a manager, as a user would, at any scale of the loss."""

from __future__ import annotations

import re

import torch

from benchmarks.diagnosis.run import Run, Scenario
from gradtrack import GradientManager
from gradtrack.errors import UsageError
from gradtrack.reports import Issue

READ = 3
"""How many issues of a diagnosis are read."""

_STATE = {"momentum_buffer": 1, "exp_avg": 1, "exp_avg_sq": 2, "square_avg": 2, "sum": 2}


def diagnose(scenario: Scenario, scale: float = 1.0, seed: int | None = None, *, clipped: bool = False) -> list[Issue]:
    """Return the diagnosis of a run whose loss is multiplied by a scale and whose optimizer makes up for it.

    `clipped` leaves the clipping on that a manager has by default, which changes many a run.
    """
    torch.manual_seed(scenario.seed if seed is None else seed)
    run = scenario.build()
    compensate(run, scale)
    settings = {"enable_gradient_clipping": clipped, "analyzers": "auto", **run.settings}
    with GradientManager(**settings) as manager:
        try:
            manager.attach(run.model, run.optimizer, horizon=run.horizon)
        except UsageError:
            return []  # an optimizer that has nothing of the model is refused, which is no diagnosis
        for step in range(run.steps):
            train(run, manager, step, scale)
        return manager.diagnose()


def train(run: Run, manager: GradientManager, step: int, scale: float) -> None:
    for change in run.before:
        change(step)
    if run.zero:
        for optimizer in run.optimizers:
            optimizer.zero_grad()
    for part in range(run.accumulate):
        loss = run.forward(step * run.accumulate + part) / run.accumulate
        if run.observe is not None:
            run.observe(manager)
        manager.step(run.model, run.optimizer, loss * scale, scaler=run.scaler, accumulate=part < run.accumulate - 1)
    for change in run.after:
        change(step)
    for optimizer in run.optimizers:
        optimizer.step() if run.scaler is None else run.scaler.step(optimizer)
    if run.scaler is not None:
        run.scaler.update()


def compensate(run: Run, scale: float) -> None:
    """Change an optimizer so that the trajectory is the same with the loss multiplied by a scale."""
    if scale == 1.0:
        return
    for optimizer in run.optimizers:
        coupled = not isinstance(optimizer, torch.optim.AdamW)
        for group in optimizer.param_groups:
            if isinstance(optimizer, torch.optim.SGD):
                group["lr"] = group["lr"] / scale
            if coupled and group.get("weight_decay"):
                group["weight_decay"] = group["weight_decay"] * scale
            if "eps" in group:
                group["eps"] = group["eps"] * scale
        for state in optimizer.state.values():
            for name, power in _STATE.items():
                if isinstance(state.get(name), torch.Tensor):
                    state[name].mul_(scale**power)


def hits(scenario: Scenario, issues: list[Issue]) -> bool:
    """Whether the first issues name the fault by its type and at its layer."""
    assert scenario.expected is not None
    return any(
        issue.issue_type.value in scenario.expected.kinds
        and (scenario.expected.where == ".*" or re.search(scenario.expected.where, issue.layer))
        for issue in issues[:READ]
    )
