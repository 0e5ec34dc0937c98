"""The rule about where values that are not finite come from."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from gradtrack import GradientManager, Issue, safe_backward


class Net(nn.Module):
    """A recurrent layer, an input by keyword that is added, and a head."""

    def __init__(self, at_end: float = 0.0) -> None:
        super().__init__()
        self.rnn, self.head, self.last = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 4), nn.Linear(4, 2)
        self.at_end = at_end

    def forward(self, x: Tensor, *, noise: Tensor) -> Tensor:
        """Return the output at each time."""
        out: Tensor = self.last(self.head(self.rnn(x)[0] + noise) + self.at_end)
        return out


def found(model: nn.Module, x: Tensor, noise: Tensor) -> list[Issue]:
    """Return what the flow analyzer finds on one step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientManager(analyzers=["flow"]) as manager:
        manager.attach(model, optimizer)
        safe_backward(model(x, noise=noise).square().mean(), model, optimizer, manager)
        return [issue for issue in manager.diagnose() if issue.layer]


@pytest.mark.parametrize(
    ("place", "layer", "named"),
    [
        ("x", "rnn", "input 0 of the model has 1 NaN at [3, 20, 0]"),
        ("noise", "head", "input noise of the model has 1 NaN at [3, 20, 0]"),
    ],
)
def test_nan_in_the_input_of_the_model_is_named(place: str, layer: str, named: str) -> None:
    """The input, how many elements and where, and the advice to look at the data."""
    data = {"x": torch.randn(4, 30, 3), "noise": torch.zeros(4, 30, 8)}
    data[place][3, 20, 0] = math.nan
    (issue,) = found(Net(), data["x"], data["noise"])
    assert (issue.layer, issue.issue_type.value) == (layer, "NUMERICAL")
    assert issue.message == f"{layer} is the first module whose output is NaN or infinite: {named}."
    assert issue.recommendation == "Look at the data of the batch of step 1."


def test_nan_that_the_model_makes_is_not_said_to_be_of_its_input() -> None:
    """Where its own code makes one of finite values, it is the input of the module that is given it."""
    (issue,) = found(Net(at_end=math.nan), torch.randn(4, 30, 3), torch.zeros(4, 30, 8))
    assert "input 0 of last has 480 NaN, the first at [0, 0, 0]" in issue.message
    assert "data" not in issue.recommendation


def test_nan_before_the_first_module_is_named_as_its_input() -> None:
    """Where the model makes it of what it was given before any module runs, the input of that module is named."""

    class Logs(Net):
        def forward(self, x: Tensor, *, noise: Tensor) -> Tensor:
            return super().forward(x.log(), noise=noise)

    x = torch.ones(4, 30, 3)
    x[1, 2, 0] = -1.0
    (issue,) = found(Logs(), x, torch.zeros(4, 30, 8))
    assert "input 0 of rnn has 1 NaN at [1, 2, 0]" in issue.message
    assert "data" not in issue.recommendation


def test_inputs_are_let_go() -> None:
    """A look keeps what the model was given no longer than its step."""
    x = torch.randn(4, 30, 3)
    there = weakref.ref(x)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientManager(analyzers=["flow"]) as manager:
        manager.attach(model, optimizer)
        safe_backward(model(x, noise=torch.zeros(4, 30, 8)).square().mean(), model, optimizer, manager)
        del x
        gc.collect()
        assert there() is None
        assert not model._forward_pre_hooks


@pytest.mark.parametrize(("lr", "named"), [(2e-4, True), (5e-3, False)])
def test_most_16_bit_weights_that_stay_explain_a_loss_that_does(lr: float, named: bool) -> None:
    """Under nine in ten are enough where a hundred steps have not moved the loss; at a rate that moves them none is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    with GradientManager(analyzers=["flow"], backends=[], enable_gradient_clipping=False) as manager:
        for _ in range(150):
            x = torch.randn(32, 8, dtype=torch.bfloat16)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x).float(), torch.randint(4, (32,)))  # nothing can be learned
            manager.step(model, optimizer, loss)
            optimizer.step()
        found = [issue for issue in manager.diagnose() if issue.statistic == "unchanged_elements"]
    assert bool(found) == named
