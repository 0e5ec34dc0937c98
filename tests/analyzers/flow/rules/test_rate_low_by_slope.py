"""A rate so low that all steps of a training together promise nothing of the loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradtrack import GradientManager, Issue


def train(lr: float, steps: int, *, warm_up: int = 0, scale: float = 1.0) -> list[Issue]:
    """Train a classifier of separable points, and return what is said of its rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr / scale)
    with GradientManager(analyzers=["flow"], enable_gradient_clipping=False, backends=[]) as manager:
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr / scale * min(1.0, (step + 1) / max(warm_up, 1))
            x = torch.randn(32, 10)
            optimizer.zero_grad()
            manager.step(model, optimizer, nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)) * scale)
            optimizer.step()
        return [issue for issue in manager.diagnose() if issue.issue_type.value == "LR_TOO_LOW"]


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_steps_that_promise_nothing_are_told(scale: float) -> None:
    """Not one weight of a million, but a few of a hundred thousand per step: whatever the scale of the loss."""
    (issue,) = train(1e-4, 120, scale=scale)
    assert issue.statistic == "promised_fall"
    assert "The 120 steps could have lowered the loss by" in issue.message


def test_a_rate_at_which_the_loss_falls_is_not_low() -> None:
    """Slow is not still: a loss that comes down is left alone, and so is one that is judged too early."""
    assert not train(1e-2, 120)
    assert not train(1e-4, 90)


def test_a_warm_up_that_goes_on_and_on_is_told_as_one() -> None:
    """A warm-up of a hundred epochs leaves a training where it began; a usual one does not."""
    (issue,) = train(0.1, 150, warm_up=100_000)
    assert "in a warm-up that is still rising" in issue.message
    assert not train(0.1, 150, warm_up=1000)
