"""Gradients that are zero for analytic reasons are no fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradtrack import GradientManager
from tests.analyzers.every_step import NAMES, every_step
from tests.training import optimizer_of

__all__ = ["every_step"]


class KeyBias(nn.Module):
    """Attention, whose key bias has an analytically zero gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        output: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return output


class Adapter(nn.Module):
    """A low-rank adapter whose one factor is zero, so that the other's gradient is."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Run base and adapter."""
        output: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return output


def before_norm() -> nn.Module:
    """Return a layer whose bias a normalisation takes out again."""
    return nn.Sequential(nn.Flatten(0, 1), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


ZEROS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor | None]]] = {
    "key bias": (KeyBias, lambda model: model.attention.in_proj_bias.grad[8:16]),  # type: ignore[union-attr,index]
    "bias before a normalisation": (before_norm, lambda model: model.get_parameter("1.bias").grad),
    "adapter": (Adapter, lambda model: model.get_parameter("down").grad),
}


@pytest.mark.parametrize("name", sorted(ZEROS))
def test_gradients_that_are_zero_by_nature_raise_no_issue(name: str, every_step: None) -> None:
    """F2: key biases, biases before a normalisation and untouched adapters are zero to 1e-12, and all is healthy."""
    torch.manual_seed(0)
    model = ZEROS[name][0]().double()
    manager = GradientManager(analyzers=list(NAMES))
    optimizer = optimizer_of(model, lr=1e-3)
    for step in range(24):
        optimizer.zero_grad()
        report = manager.step(model, optimizer, (model(torch.randn(4, 5, 8).double()) - 1).square().mean())
        gradient = ZEROS[name][1](model)
        assert gradient is not None
        assert step > 0 or float(gradient.abs().max()) < 1e-12
        optimizer.step()
        assert report.health.healthy
    assert manager.diagnose() == []
