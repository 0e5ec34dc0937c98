"""Reasons to stay silent, and the faults that look like them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrack import GradientManager, VectorAnalyzer
from gradtrack.analyzers.base import Series
from gradtrack.analyzers.flow.rules.steps import judge_first_steps, judge_oscillation
from gradtrack.analyzers.flow.samples import Case, Sample
from gradtrack.analyzers.vector import judge


def diagnosed(model: nn.Module, loss_of: Callable[[int], Tensor], rate: float, steps: int = 40) -> list[str]:
    """Train by gradient descent without clipping, and return the keys of the issues."""
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with GradientManager(analyzers=["flow"], enable_gradient_clipping=False) as manager:
        manager.attach(model, optimizer)
        for step in range(steps):
            optimizer.zero_grad()
            manager.step(model, optimizer, loss_of(step))
            optimizer.step()
        return [issue.key for issue in manager.diagnose()]


def noise(step: int, *shape: int) -> Tensor:
    """Return the random numbers of a step."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize(("power", "expected"), [(1, []), (1e-9, ["LR_TOO_LOW"])])
def test_a_converged_regression_has_no_low_rate(power: float, expected: list[str]) -> None:
    """Where little is left to learn, small steps are right; where much is, they are not."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 1), noise(0, 64, 8)
    target = x[:, :1] - x[:, 1:2]
    if power == 1:
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, -1.0, *[1e-7] * 6]]))
            model.bias.zero_()
    assert diagnosed(model, lambda _: F.mse_loss(model(x), target), 0.1 * power) == expected


def test_one_channel_that_is_normalised_is_no_bottleneck() -> None:
    """A layer that takes in no more than it lets out narrows nothing."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))
    model = nn.Sequential(nn.BatchNorm2d(1), *body)
    assert diagnosed(model, lambda t: F.cross_entropy(model(noise(t, 16, 1, 8, 8)), torch.arange(16) % 4), 0.01) == []


@pytest.mark.parametrize(("step", "expected"), [(torch.round, True), (torch.tanh, False)])
def test_a_step_function_disconnects_what_is_before_it(step: Callable[[Tensor], Tensor], expected: bool) -> None:
    """Rounding has no slope, so the layers before it get zeros for ever."""
    torch.manual_seed(0)
    encode, decode = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.ModuleDict({"encode": encode, "decode": decode})

    def loss_of(t: int) -> Tensor:
        x = noise(t, 32, 8)
        return F.mse_loss(decode(step(3 * encode(x))), x)

    assert ("DISCONNECTED:encode" in diagnosed(model, loss_of, 0.01)) is expected


def players(rate: float, pull: float) -> list[str]:
    """Let two players of a bilinear game step at the same time, and return what is found."""
    model = nn.ParameterList([torch.ones(4), torch.ones(4)])

    def loss_of(_: int) -> Tensor:
        x, y = model
        calm = pull * (x.square().sum() + y.square().sum())
        total: Tensor = (x * y.detach()).sum() - (x.detach() * y).sum() + calm
        return total

    return diagnosed(model, loss_of, rate)


def test_two_players_who_go_round_each_other_are_told() -> None:
    """Their gradient turns right round without getting shorter; with a pull to the middle it gets shorter."""
    assert players(0.1, 0.0)[0] == "ROTATION"
    assert "ROTATION" not in players(0.1, 0.5)


def test_rotation_of_an_observed_game_needs_norms_that_do_not_fall() -> None:
    """A spiral that leads to the middle is no fault, and a share of rotation below a half is none either."""
    rising, falling = [0.01 * step for step in range(20)], [-0.2 * step for step in range(20)]
    assert [issue.issue_type.value for issue in judge(0.8, rising)] == ["ROTATION"]
    assert judge(0.8, falling) == judge(0.4, rising) == judge(0.8) == judge(None) == []
    assert [issue.severity.value for issue in judge(0.99)] == ["MEDIUM"]


def test_a_game_is_judged_offline() -> None:
    """The report on a game that only rotates says so."""
    x, y = (torch.ones(1, requires_grad=True) for _ in range(2))
    game: Any = {"min": ([x], lambda: (x * y).sum()), "max": ([y], lambda: -(x * y).sum())}
    assert [issue.issue_type.value for issue in VectorAnalyzer().analyze_game(game).issues] == ["ROTATION"]


def case_of(norms: list[float], losses: list[float], cosine: float = math.nan) -> Case:
    """Return a run of these norms and losses, whose successive gradients have a cosine."""
    series = Series()
    for norm, loss in zip(norms, losses, strict=True):
        series.append(math.log(norm), loss, (), finite=True)
    samples = [
        Sample(step, [], {}, changes={"w": _change()}, cosine=cosine, lr=0.1) for step in range(4, len(norms), 4)
    ]
    return Case(series, samples)


def _change() -> Any:
    from gradtrack.analyzers.flow.sampled_weights import Change

    return Change(0.01, 0.0)


def test_what_goes_up_and_down_is_no_instability() -> None:
    """Gradients that turn round at each step and grow all through are a fault; at the edge of stability none are."""
    growing = [1.05**step for step in range(40)]
    wavy = [1 + 0.8 * math.sin(step / 3) for step in range(40)]
    assert [issue.issue_type.value for issue in judge_oscillation(case_of(growing, growing, -0.95))] == ["UNSTABLE"]
    assert not list(judge_oscillation(case_of(wavy, wavy, -0.95)))


def test_a_first_gradient_that_ruins_everything_is_the_cause() -> None:
    """A first norm a thousand times the next is named, unless the loss came down after it."""
    norms = [1e7, *[1.0] * 39]
    assert [issue.key for issue in judge_first_steps(case_of(norms, [1.0] * 40))] == ["EXPLODING"]
    assert not list(judge_first_steps(case_of(norms, [1e7 * 0.5**step for step in range(40)])))
    assert not list(judge_first_steps(case_of([100.0, *[1.0] * 39], [1.0] * 40)))
