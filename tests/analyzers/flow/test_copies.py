"""Matrices that are copies of each other and stay so."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from gradtrack import GradientManager


class Twins(nn.Module):
    """Two towers whose outputs are added up."""

    def __init__(self, *, copied: bool, apart: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.two = copy.deepcopy(self.one) if copied else nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum; towers that are apart see different halves of the data."""
        found: Tensor = self.one(x) + self.two(x.flip(0) if self.apart else x)
        return found


def told(model: nn.Module, steps: int = 40) -> list[tuple[str, str]]:
    """Return what is said of equal units."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with GradientManager(analyzers=["flow"], backends=[]) as manager:
        for _ in range(steps):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            manager.step(model, optimizer, nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)))
            optimizer.step()
        return [(i.layer, i.message) for i in manager.diagnose() if i.issue_type.value == "EQUAL_UNITS"]


def test_copies_that_are_used_alike_are_named() -> None:
    """Both matrices of the second tower are those of the first, and never differ."""
    ((layer, message),) = told(Twins(copied=True))
    assert layer == "two.0"
    assert message == "two.0.weight has the weights and the gradient of one.0.weight: the two are one. 1 more are so."


def test_copies_that_are_used_apart_are_none() -> None:
    """Equal at first, they have gradients of their own, as the layers of a deep copy do."""
    assert told(Twins(copied=True, apart=True)) == []
    assert told(Twins(copied=False)) == []
    assert told(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)) == []
