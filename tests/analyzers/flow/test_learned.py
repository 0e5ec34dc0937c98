"""What a training that learns looks like, beside the fault that looks like it, and what comes first of several."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from gradtrack import GradientManager, Issue
from gradtrack.analyzers.flow.call import Node, _gram
from tests.health.test_rules import judged


def noise(step: int, *shape: int) -> Tensor:
    """Return the random numbers of a step."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels that a linear model can tell apart."""
    x = noise(step, 64, 20)
    return x, x[:, :3].argmax(-1)


def diagnosed(
    model: nn.Module, optimizer: Any, loss_of: Callable[[int], Tensor] | None = None, steps: int = 40
) -> list[Issue]:
    """Train without clipping, on labels where no loss is given, and return what is found."""

    def labels(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    with GradientManager(backends=[], analyzers=["flow"], enable_gradient_clipping=False) as manager:
        manager.attach(model, optimizer)
        for step in range(steps):
            optimizer.zero_grad()
            manager.step(model, optimizer, (loss_of or labels)(step))
            optimizer.step()
        return manager.diagnose()


def stack(act: type[nn.Module], *widths: int) -> nn.Sequential:
    """Return linear layers with a function between them."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        parts += [nn.Linear(before, after), act()]
    return nn.Sequential(*parts[:-1])


def keys(issues: list[Issue]) -> list[str]:
    """Return the type and layer of each issue."""
    return [issue.key for issue in issues]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [200, 600])
def test_units_that_die_of_the_rate_are_its_consequence(steps: int) -> None:
    """Plain descent a hundred times too fast is named, though the weights behind dead units stopped moving long ago."""
    model = stack(nn.ReLU, 20, 64, 64, 64, 3)
    found = diagnosed(model, torch.optim.SGD(model.parameters(), 10.0), steps=steps)
    assert found[0].key == "LR_TOO_HIGH"
    assert all(issue.explained_by == "LR_TOO_HIGH" for issue in found if issue.issue_type.value == "DEAD")


def test_a_jumping_norm_of_what_is_left_of_a_loss_is_no_instability() -> None:
    """Where a fifth of the loss is left, the norm is that of the few inputs that are not learned yet."""
    wild = [30.0, 0.3] * 60
    begun, left = [1.0, 0.9] * 5, [0.1, 0.01] * 55
    assert any("UNSTABLE" in open_ for open_ in judged(wild, [1.0, 0.1] * 60))
    assert not any("UNSTABLE" in open_ for open_ in judged(wild, [*begun, *left])[40:])


@pytest.mark.parametrize(("level", "expected"), [(1.0, False), (300.0, True)])
def test_a_jump_to_less_than_there_was_at_first_is_none(level: float, expected: bool) -> None:
    """Near the end a hard batch may have ten times the gradient of the others, but not more than those at first."""
    norms = [*[3.0] * 10, *[0.03] * 40, level]
    losses = [*[2.0] * 10, *[0.01] * 40, 0.1]
    assert ("EXPLODING" in judged(norms, losses)[-1]) is expected


def tuned(gain: float) -> list[str]:
    """Tune a tanh network that is sure of what it has learned, its inputs multiplied by a gain."""
    model = stack(nn.Tanh, 20, 64, 64, 3)
    x, first = noise(1, 512, 20), torch.optim.Adam(model.parameters(), 1e-2)
    y = (x @ noise(2, 20, 3)).argmax(1)
    for _ in range(300):
        first.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        first.step()
    near = gain * (x + 0.3 * noise(3, 512, 20))

    def loss_of(step: int) -> Tensor:
        chosen = torch.randint(0, 512, (32,), generator=torch.Generator().manual_seed(step))
        return F.cross_entropy(model(near[chosen]), y[chosen])

    return keys(diagnosed(model, torch.optim.AdamW(model.parameters(), 1e-5), loss_of))


def test_a_network_that_is_sure_of_itself_is_not_saturated() -> None:
    """Half of its outputs are at the ends of their range, but not for the inputs that the gradient comes from."""
    assert tuned(1.0) == []
    assert any(key.startswith("SATURATION") for key in tuned(100.0))


class Unrolled(nn.Module):
    """A cell by hand, whose state grows."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.enter, self.read = nn.Linear(16, 16, bias=False), nn.Linear(4, 16), nn.Linear(16, 1)
        nn.init.orthogonal_(self.state.weight, 1.8)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last state says."""
        h = x.new_zeros(len(x), 16)
        for step in range(x.shape[1]):
            h = F.leaky_relu(self.state(h) + self.enter(x[:, step]), 0.5)
        found: Tensor = self.read(h)
        return found


def test_a_cell_is_told_by_its_time_steps() -> None:
    """The calls of an unrolled cell are time steps, and not layers."""
    torch.manual_seed(0)
    model = Unrolled()
    found = diagnosed(model, torch.optim.SGD(model.parameters(), 1e-12), lambda t: model(noise(t, 16, 30, 4)).mean())
    (issue,) = [issue for issue in found if issue.issue_type.value == "EXPLODING"]
    assert "30 calls of state (time steps)" in issue.message or "29 calls of state (time steps)" in issue.message
    assert "layers in between" not in issue.message


def test_what_each_of_many_calls_reads_counts_together() -> None:
    """A readout of every step gets as much gradient as the cell, which is compared with all of its calls."""
    torch.manual_seed(0)
    cell, read = nn.GRUCell(4, 16), nn.Linear(16, 1)
    model = nn.ModuleDict({"cell": cell, "read": read})

    def loss_of(step: int) -> Tensor:
        x, h, total = noise(step, 16, 60, 4), torch.zeros(16, 16), torch.zeros(())
        for place in range(60):
            h = cell(x[:, place], h)
            total = total + (read(h) - x[:, place, :1]).square().mean()
        return total

    assert keys(diagnosed(model, torch.optim.Adam(model.parameters(), 1e-3), loss_of)) == []


@pytest.mark.parametrize("dead", [False, True])
def test_transforms_of_functions_are_passed_over(dead: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Gradients per sample by vmap, ahead of the ordinary pass, neither disturb the diagnosis nor end it."""
    model = stack(nn.ReLU, 20, 32, 32, 3)
    if dead:
        nn.init.constant_(model.get_parameter("2.bias"), -50.0)

    def of_one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    def loss_of(step: int) -> Tensor:
        x, y = batch(step)
        vmap(grad(of_one), (None, 0, 0))({name: p.detach() for name, p in model.named_parameters()}, x, y)
        return F.cross_entropy(model(x), y)

    with caplog.at_level(logging.WARNING, "gradtrack"):
        found = keys(diagnosed(model, torch.optim.Adam(model.parameters(), 1e-3), loss_of))
    assert found[:1] == (["DEAD:2"] if dead else [])
    assert not caplog.messages


@pytest.mark.parametrize(("with_bias", "expected"), [(True, False), (False, True)])
def test_a_constant_that_a_derivative_does_not_see_is_connected(with_bias: bool, expected: bool) -> None:
    """The last bias of an energy gets no gradient from its slope; a whole layer without one is another matter."""
    model = stack(nn.Tanh, 2, 32, 1)
    spare = None if with_bias else nn.Linear(2, 2)
    whole = nn.ModuleDict({"energy": model} if spare is None else {"energy": model, "spare": spare})

    def loss_of(step: int) -> Tensor:
        x = noise(step, 32, 2).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope - 2 * x.detach()).square().mean()

    found = keys(diagnosed(whole, torch.optim.Adam(whole.parameters(), 1e-3), loss_of))
    assert found == (["DISCONNECTED:spare"] if expected else [])


@given(st.integers(0, 1000), st.integers(1, 8), st.integers(8, 40))
def test_the_cheap_rank_is_no_more_than_the_effective_one(seed: int, rank: int, rows: int) -> None:
    """The rank by squares bounds the rank by entropy from below, so that it may rule out a bottleneck."""
    source = np.random.default_rng(seed)
    values = source.normal(size=(rows, rank)) @ source.normal(size=(rank, 20))
    node = Node("layer", "Linear", True, 1, 20, gram=_gram(torch.from_numpy(values), (values**2).sum(1)))
    least = node.least_rank
    singular = np.linalg.svd(values[:: -(-rows // 32)], compute_uv=False)
    shares = singular / singular.sum()
    entropy = -(shares[shares > 0] * np.log(shares[shares > 0])).sum()
    assert 1 - 1e-9 <= least <= node.effective_rank + 1e-9
    assert node.effective_rank == pytest.approx(np.exp(entropy), rel=1e-4)
