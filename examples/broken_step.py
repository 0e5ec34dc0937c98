"""A training that breaks at step 21, and the function by which `gradtrack replay-step` computes that step again.

Run it with `python broken_step.py runs/broken`, then
`gradtrack replay-step runs/broken/capture-00021 broken_step.py:make`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradtrack import GradientManager, safe_backward

Batch = tuple[Tensor, Tensor]


class Standardised(nn.Module):
    """Brings each measurement to mean 0 and deviation 1 within its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / x.std(0)


class Sensors(nn.Module):
    """Predicts a number from four sensors."""

    def __init__(self) -> None:
        super().__init__()
        self.standardised = Standardised()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(self.standardised(x))
        return found


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def make() -> tuple[nn.Module, Callable[[nn.Module, Batch], Tensor]]:
    """Return what the training trains, and its loss of a batch."""
    return Sensors(), loss_of


def train(run_dir: str, steps: int = 30) -> None:
    torch.manual_seed(0)
    model, loss_of = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GradientManager(run_dir=run_dir, capture="nonfinite", save_gradient_plots=False) as manager:
        manager.attach(model, optimizer)  # so that the first forward pass is seen, too
        for step in range(1, steps + 1):
            x = torch.randn(16, 4)
            if step == 21:
                x[:, 2] = 1.0  # a sensor that is stuck
            batch = (x, x.sum(1, keepdim=True))
            optimizer.zero_grad()
            report = safe_backward(loss_of(model, batch), model, optimizer, manager, batch=batch)
            optimizer.step()
            if report.skipped:
                print(f"step {report.step} was skipped")


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "runs/broken")
