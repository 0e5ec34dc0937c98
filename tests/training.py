"""Small models and training steps for the tests."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradtrack import GradientManager, StepReport

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs kernels on the CPU, as in the process of `tests/gradients/triton`."""
ENGINES: tuple[Any, ...] = ("native", "torch", *(["triton"] if INTERPRETED else []))
"""The engines that measure tensors of the CPU here."""


def small_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a model with four parameters of different shapes."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model.to(dtype)


def layer(model: nn.Sequential, index: int) -> nn.Linear:
    """Return a linear layer of a model."""
    found = model[index]
    assert isinstance(found, nn.Linear)
    return found


class Scaled(nn.Module):
    """A block whose backward gain is known."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        """Scale."""
        return x * self.gain


def batch_loss(model: nn.Module, step: int = 0, scale: float = 1.0) -> Tensor:
    """Return the loss of a batch that depends on the step only."""
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 + step)).to(dtype)
    loss: Tensor = scale * model(inputs).square().mean()
    return loss


def with_gradients(gradients: Sequence[Tensor | None]) -> nn.Module:
    """Return a model whose parameters have exactly these gradients."""
    model = nn.Module()
    for index, gradient in enumerate(gradients):
        shape = (2,) if gradient is None else tuple(gradient.shape)
        dtype = torch.float32 if gradient is None else gradient.dtype
        param = nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = gradient
        setattr(model, f"p{index}", param)
    return model


def optimizer_of(model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> Any:
    """Return an optimizer of all parameters."""
    return kind(model.parameters(), **{"lr": 0.1, **options})


def look(model: nn.Module, manager: GradientManager | None = None, **settings: Any) -> StepReport:
    """Report the gradients that a model has, without a backward pass."""
    manager = manager or GradientManager(**settings)
    return manager.step(model, optimizer_of(model), None, backward=False)


def train(
    manager: GradientManager,
    steps: int,
    *,
    model: nn.Module | None = None,
    optimizer: Any = None,
    change: Callable[[int, Tensor], Tensor] = lambda step, loss: loss,
) -> list[StepReport]:
    """Train a small model for some steps and return the reports; `change` may spoil the loss of a step."""
    model = model or small_model()
    optimizer = optimizer or optimizer_of(model)
    reports = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        reports.append(manager.step(model, optimizer, change(step, batch_loss(model, step))))
        optimizer.step()
    return reports


def as_one_vector(gradients: Sequence[Tensor | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return all gradients as one float64 vector."""
    parts = [gradient.detach().double().numpy().ravel() for gradient in gradients if gradient is not None]
    return np.concatenate(parts) if parts else np.zeros(0)
