"""Layers that are easily mistaken: few units behind a norm, functions made of lines, plateaus, necks, own code."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrack import GradientFlowAnalyzer, GradientManager


def keys(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 40,
    loss: Callable[[Tensor, Tensor], Tensor] = lambda out, x: F.cross_entropy(out, x[:, :3].argmax(-1)),
) -> list[str]:
    """Train a model and return what is wrong with it."""
    with GradientManager(analyzers=["flow"], enable_gradient_clipping=False) as manager:
        manager.attach(model, optimizer)
        for step in range(steps):
            x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            manager.step(model, optimizer, loss(model(x), x))
            optimizer.step()
        return [issue.key for issue in manager.diagnose()]


def net(act: Callable[[], nn.Module], width: int = 32) -> nn.Sequential:
    """Return a perceptron of three inner layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(8, width), act(), nn.Linear(width, width), act(), nn.Linear(width, width), act()),
        nn.Linear(width, 3),
    )


def test_a_plateau_that_training_has_left_is_none() -> None:
    """A net that begins flat, and comes out of it by itself, has no vanishing gradient any more."""
    model = net(nn.Tanhshrink, 48)
    assert keys(model, torch.optim.Adam(model.parameters(), 5e-3), steps=80) == []


def test_a_plateau_that_lasts_is_told() -> None:
    """The same net at a rate that leaves it there has one."""
    model = net(nn.Tanhshrink, 48)
    assert "VANISHING:0" in keys(model, torch.optim.Adam(model.parameters(), 1e-5))


@pytest.mark.parametrize(("bias", "expected"), [(0.0, []), (-20.0, ["DEAD:1"])])
def test_few_units_behind_a_norm_are_not_off_by_luck(bias: float, expected: list[str]) -> None:
    """A normalisation by the batch has both signs in every unit, so that even eight units are no matter of luck."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.constant_(model[1].bias, bias)  # type: ignore[arg-type]
    assert keys(model, torch.optim.Adam(model.parameters(), 1e-3)) == expected


@pytest.mark.parametrize(("act", "expected"), [(nn.Hardtanh, True), (nn.Hardsigmoid, True), (nn.ReLU6, False)])
def test_functions_made_of_lines_saturate_at_both_ends(act: type[nn.Module], expected: bool) -> None:
    """Lines that stand in for tanh and sigmoid are flat where these are; ReLU6 is another function."""
    model = net(act)
    with torch.no_grad():
        model[2].weight.mul_(200)  # type: ignore[operator]
    found = keys(model, torch.optim.SGD(model.parameters(), 1e-4))
    assert ("SATURATION:2" in found[:3]) == expected


def test_a_neck_that_the_loss_has_halved_with_holds_nothing_up() -> None:
    """A code of one number for points on a line is told of at no time after it has been learned."""
    torch.manual_seed(0)
    line = torch.randn(1, 8)
    model = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 1), nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 8))
    inside = nn.Sequential(_Line(line), model)
    found = keys(
        inside, torch.optim.Adam(model.parameters(), 1e-2), 80, lambda out, x: F.mse_loss(out, x[:, :1] @ line)
    )
    assert found == []


class _Line(nn.Module):
    """Puts the first number of each row on a line."""

    def __init__(self, line: Tensor) -> None:
        super().__init__()
        self.line = line

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] @ self.line


class Odd(nn.Module):
    """Does something of its own with what a layer of its own puts out."""

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.map, self.what = nn.Linear(16, 16), what

    def forward(self, x: Tensor) -> Tensor:
        """Return what is made of the output of the layer."""
        return self.what(self.map(x))


@pytest.mark.parametrize(
    ("what", "layer"),
    [
        (lambda x: torch.log(x.relu()), "odd"),  # not finite on its way
        (lambda x: torch.acos(0 * x + 1), "odd.map"),  # not finite on its way back
    ],
)
def test_the_module_that_makes_numbers_not_finite_is_named(what: Callable[[Tensor], Tensor], layer: str) -> None:
    """What a module does between its layers is its own, not that of the layer which takes the result."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(begin=nn.Linear(8, 16), odd=Odd(what), head=nn.Linear(16, 3)))
    analyzer = GradientFlowAnalyzer(model)
    offline = analyzer.analyze(lambda: torch.randn(64, 8), lambda out: out.square().mean(), steps=4)
    assert [issue.key for issue in offline] == [f"NUMERICAL:{layer}"]
    assert keys(model, torch.optim.Adam(model.parameters(), 1e-3))[0] == f"NUMERICAL:{layer}"
