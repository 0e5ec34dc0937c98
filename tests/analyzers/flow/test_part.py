"""Faults of a part of a model or of a training: one group's rate, one head, a rate that came down, a late cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrack import GradientManager, Issue
from gradtrack.analyzers.flow.graph import FlowGraph
from gradtrack.analyzers.flow.probe import Probe
from gradtrack.support.interrupts import Changes


class Two(nn.Module):
    """Two bodies that are joined, the second of which may be called without gradients, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 16)
        self.out, self.cut = nn.Linear(32, 3), False
        self.dropped = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        with torch.set_grad_enabled(not self.cut):
            second = torch.zeros(len(x), 16) if self.dropped else self.second(x)
        found: Tensor = self.out(torch.cat([self.first(x), second], 1).tanh())
        return found


def keys(
    model: nn.Module,
    optimizer: Any,
    steps: int = 60,
    before: Callable[[int], object] = lambda _: None,
    noise: float = 0.0,
) -> list[str]:
    """Train a classifier and return what is wrong with it."""
    return [issue.key for issue in issues(model, optimizer, steps, before, noise)]


def issues(
    model: nn.Module,
    optimizer: Any,
    steps: int = 60,
    before: Callable[[int], object] = lambda _: None,
    noise: float = 0.0,
) -> list[Issue]:
    """Train a classifier and diagnose it."""
    with GradientManager(analyzers=["flow"], enable_gradient_clipping=False) as manager:
        manager.attach(model, optimizer)
        for step in range(1, steps + 1):
            before(step)
            source = torch.Generator().manual_seed(step)
            x = torch.randn(48, 8, generator=source)
            labels = (x + noise * torch.randn(48, 8, generator=source))[:, :3].argmax(-1)
            optimizer.zero_grad()
            manager.step(model, optimizer, F.cross_entropy(model(x), labels))
            optimizer.step()
        return manager.diagnose()


def body(*widths: int) -> nn.Sequential:
    """Return a perceptron."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


def test_a_first_step_that_leaves_nothing_is_a_rate_too_high() -> None:
    """Weights that one step has thrown away are told of, though the loss comes down to that of chance afterwards."""
    model = body()
    assert "LR_TOO_HIGH" in keys(model, torch.optim.Adam(model.parameters(), 1.0), noise=50.0)[:2]


def test_a_group_with_a_rate_too_high_is_named() -> None:
    """A head of its own rate is named by itself where the loss is far above what it was at first."""
    model = body()
    groups = [{"params": model[:4].parameters(), "lr": 1e-4}, {"params": model[4].parameters(), "lr": 3.0}]
    assert "LR_TOO_HIGH:4" in keys(model, torch.optim.Adam(groups), noise=50.0)[:3]


def test_a_group_with_a_rate_too_low_is_named() -> None:
    """Weights that stand still beside others that learn are named, though their gradient is as large."""
    model = body()
    groups = [{"params": model[2:].parameters(), "lr": 1e-3}, {"params": model[0].parameters(), "lr": 3e-8}]
    assert keys(model, torch.optim.Adam(groups), noise=2.0) == ["LR_TOO_LOW:0"]


def test_a_group_that_stands_still_is_named_though_the_loss_falls() -> None:
    """What learns without a layer hides that its rate is wrong by orders of magnitude, and the advice is about it."""
    model = body()
    groups = [{"params": model[2:].parameters(), "lr": 3e-3}, {"params": model[0].parameters(), "lr": 1e-9}]
    (found,) = issues(model, torch.optim.Adam(groups))
    assert found.key == "LR_TOO_LOW:0"
    assert "Multiply the rate" in found.recommendation


def test_a_group_whose_first_step_made_it_worse_is_named() -> None:
    """A head that the first step has thrown away is told of, though the rest has learned to live with it."""
    model = body()
    groups = [{"params": model[:4].parameters(), "lr": 1e-3}, {"params": model[4].parameters(), "lr": 8.0}]
    assert keys(model, torch.optim.Adam(groups), steps=100)[0] == "LR_TOO_HIGH:4"


def test_what_is_ruined_later_is_not_laid_on_the_first_step() -> None:
    """A first step that moved one weight far, and did no harm, has not silenced what is lost fifty steps on."""
    model = body()
    weight, bias = model.get_parameter("2.weight"), model.get_parameter("2.bias")

    def disturb(step: int) -> None:
        with torch.no_grad():
            if step == 2:  # between the first step and the second
                weight.add_(0.3 * weight.std() * torch.randn_like(weight))
            if step == 48:
                bias.fill_(-50.0)

    assert keys(model, torch.optim.SGD(model.parameters(), 0.02), before=disturb, steps=80) == ["SATURATION:2"]


def test_a_single_matrix_may_be_thrown_away() -> None:
    """Nothing rests on what a softmax regression began with, so that a step may leave nothing of it."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    assert keys(model, torch.optim.SGD(model.parameters(), 5.0)) == []


def test_a_rate_that_has_come_down_too_soon_is_too_low() -> None:
    """A schedule that halves the rate on every step ends the training before it has begun."""
    model = body()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def halve(_: int) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    assert keys(model, optimizer, before=halve) == ["LR_TOO_LOW"]


def test_a_late_cut_is_a_disconnection() -> None:
    """A body that still runs, and has had no gradient for ten steps after it always had one, is named."""
    torch.manual_seed(0)
    model = Two()

    def cut(step: int) -> None:
        model.cut = step > 40

    (issue,) = issues(model, torch.optim.Adam(model.parameters(), 1e-3), before=cut)
    assert issue.key == "DISCONNECTED:second"
    assert issue.message == (
        "2 trainable parameters of second had no gradient in the last 20 of 60 steps: second.weight, second.bias."
    )
    assert keys(model, torch.optim.Adam(model.parameters(), 1e-3), before=lambda step: cut(40 + step % 2)) == []


def test_a_body_that_is_not_used_any_more_is_no_disconnection() -> None:
    """What ran at the last sample may not have run since, and then needs no gradient."""
    torch.manual_seed(0)
    model = Two()

    def drop(step: int) -> None:
        model.dropped = step > 64

    assert keys(model, torch.optim.Adam(model.parameters(), 1e-3), steps=76, before=drop) == []


def test_a_zero_head_that_no_optimizer_has_is_unchanged() -> None:
    """Weights of zero that stay so are named, though nothing can be said of their relative change."""
    model = body()
    nn.init.zeros_(model[4].weight)  # type: ignore[arg-type]
    assert "UNCHANGED:4" in keys(model, torch.optim.Adam(model[:4].parameters(), 1e-3))


def test_a_gain_that_a_normalisation_undoes_is_none() -> None:
    """A layer of tiny outputs right before a normalisation has a large gradient, and learns as well as any other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    with torch.no_grad():
        model[0].weight.mul_(1e-3)  # type: ignore[operator]
    assert keys(model, torch.optim.Adam(model.parameters(), 1e-3), noise=50.0) == []


class Length(nn.Module):
    """The length of each row of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return it as a column."""
        found: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return found


@pytest.mark.parametrize(("between", "expected"), [(nn.LayerNorm(4), {"0"}), (Length(), set())])
def test_a_length_is_no_normalisation(between: nn.Module, expected: set[str]) -> None:
    """What is measured, and not divided by it, keeps its size, and the gradient there is judged."""
    model = nn.Sequential(nn.Linear(4, 4), between, nn.Linear(1 if isinstance(between, Length) else 4, 1))
    changes = Changes()
    probe = Probe(model, changes)
    torch.autograd.backward(model(torch.randn(3, 4)).sum())
    changes.undo()
    assert FlowGraph(probe.nodes).normalised == expected
