"""How scenarios make optimizers, losses and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.data import Batches
from benchmarks.diagnosis.run import Run

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05),
    "momentum": lambda params: torch.optim.SGD(params, 0.02, momentum=0.9),
    "nesterov": lambda params: torch.optim.SGD(params, 0.02, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adam": lambda params: torch.optim.Adam(params, 1e-3),
    "adam_fast": lambda params: torch.optim.Adam(params, 5e-3),
    "adamw": lambda params: torch.optim.AdamW(params, 3e-4, weight_decay=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 1e-3),
    "adagrad": lambda params: torch.optim.Adagrad(params, 1e-2),
    "nadam": lambda params: torch.optim.NAdam(params, 1e-3),
}


def classify(model: nn.Module, batches: Batches, optimizer: str | Any = "adam", **options: Any) -> Run:
    """Return a run that classifies, with the loss over every position of the output."""

    def forward(step: int) -> Tensor:
        x, y = batches(step)
        out = model(x)
        return F.cross_entropy(
            out.reshape(-1, out.shape[-1]).float(), y.reshape(-1), label_smoothing=options.get("smoothing", 0.0)
        )

    rest = {key: value for key, value in options.items() if key != "smoothing"}
    return Run(model=model, forward=forward, optimizer=make(optimizer, model.parameters()), **rest)


def regress(
    model: nn.Module,
    batches: Batches,
    optimizer: str | Any = "adam",
    loss: Callable[..., Tensor] = F.mse_loss,
    **options: Any,
) -> Run:
    """Return a run that regresses."""

    def forward(step: int) -> Tensor:
        x, y = batches(step)
        return loss(model(x), y)

    return Run(model=model, forward=forward, optimizer=make(optimizer, model.parameters()), **options)


def make(optimizer: str | Any, params: Iterable[nn.Parameter]) -> Any:
    """Return an optimizer by its name, by a function of the parameters, or the one that is given."""
    if isinstance(optimizer, str):
        optimizer = OPTIMIZERS[optimizer]
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    return optimizer([param for param in params if param.requires_grad])


def schedule(run: Run, factor: Callable[[int], float]) -> Run:
    """Multiply the learning rates of a run by a factor that depends on the step."""

    def change(step: int) -> None:
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("base_lr", group["lr"])
                group["lr"] = group["base_lr"] * factor(step)

    run.before.append(change)
    return run


def pretrain(run: Run, steps: int) -> Run:
    """Train a run before it is looked at."""
    for step in range(steps):
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        run.forward(100_000 + step).backward()  # type: ignore[no-untyped-call]
        for optimizer in run.optimizers:
            optimizer.step()
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    return run
