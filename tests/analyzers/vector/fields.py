"""Vector fields whose divergence and rotation are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

DISCOUNT = 0.9
CYCLE = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.float64)


def saddle(epsilon: float = 0.0) -> dict[str, Any]:
    """Return the game min_x max_y xy + ε/2 (x² - y²)."""
    x, y = (torch.full((1,), value, dtype=torch.float64, requires_grad=True) for value in (0.7, -0.3))

    def value() -> Tensor:
        return (x * y + epsilon / 2 * (x**2 - y**2)).sum()

    return {"min": ([x], value), "max": ([y], lambda: -value())}


def temporal_difference(theta: Tensor) -> Tensor:
    """Return the semi-gradient of TD(0) on the uniform cycle of three states with rewards."""
    rewards = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    return (theta - rewards - DISCOUNT * CYCLE @ theta) / 3


def network_gradient(size: int = 5) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return the gradient field of a small network's squared error, and a point."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(size, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    inputs, targets = (torch.randn(16, width, generator=generator, dtype=torch.float64) for width in (size, 1))
    shapes = {name: param.shape for name, param in model.named_parameters()}
    at = torch.cat(
        [torch.randn(shape, generator=generator, dtype=torch.float64).flatten() for shape in shapes.values()]
    )

    def loss(flat: Tensor) -> Tensor:
        parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
        params = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        output: Tensor = torch.func.functional_call(model, params, inputs)
        return (output - targets).square().mean()

    return torch.func.grad(loss), at
