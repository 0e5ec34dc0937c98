"""Training beside the analyzers that look at gain, Jacobians, field and updates is training without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrack import GradientManager, UpdatesAnalyzer, VectorAnalyzer
from gradtrack.analyzers.base import always
from gradtrack.analyzers.gain import GainAnalyzer
from gradtrack.analyzers.jacobian import JacobianAnalyzer
from tests.training import optimizer_of

ANALYZERS = (GainAnalyzer, JacobianAnalyzer, UpdatesAnalyzer, VectorAnalyzer)


class Block(nn.Module):
    """A residual block with batch statistics, dropout and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.activation, self.dropout = nn.ReLU(inplace=True), nn.Dropout2d(0.2)

    def forward(self, x: Tensor) -> Any:
        """Run the block."""
        return x + self.dropout(self.activation(self.norm(self.convolution(x))))


def convolutional() -> nn.Module:
    """Return a small CNN of four blocks."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Sequential(*(Block() for _ in range(4))), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


def train(manager: GradientManager | None, kind: type[torch.optim.Optimizer]) -> list[Any]:
    """Train a CNN for fifty steps of two micro-batches; return weights, buffers, moments and random state."""
    torch.manual_seed(0)
    model = convolutional()
    optimizer = optimizer_of(model, kind, lr=1e-2)
    if manager is not None:
        manager.attach(model, optimizer)
    for _ in range(50):
        optimizer.zero_grad()
        for micro_batch in range(2):
            loss = nn.functional.cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.randint(3, (4,)))
            if manager is None:
                torch.autograd.backward(loss)
            else:
                manager.step(model, optimizer, loss, accumulate=micro_batch == 0)
        optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.state_dict().values(), *moments, torch.get_rng_state()]


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every analyzer look at every step."""
    for analyzer in ANALYZERS:
        monkeypatch.setattr(analyzer, "schedule", staticmethod(always))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_fifty_steps_are_bitwise_equal(kind: type[torch.optim.Optimizer], every_step: None) -> None:
    """O1: with all four at every step weights, buffers, moments and the random generator are the same, bit for bit."""
    analyzers = ["gain", {"name": "jacobian", "exact_limit": 8}, "updates", "vector"]
    manager = GradientManager(analyzers=analyzers, enable_gradient_clipping=False)
    watched, plain = train(manager, kind), train(None, kind)
    for one, other in zip(watched, plain, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    last = manager.reports[-1].analyzers
    assert list(last) == ["gain", "jacobian", "updates", "vector"]
    assert last["gain"]["gains"].count(None) == 0
    assert last["jacobian"]["skipped"] == {}
    assert len(last["jacobian"]["blocks"]) == 4
    assert last["vector"]["coherence"] is not None
    assert last["updates"]["step"] == 49


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
    manager = GradientManager(analyzers=["gain", "jacobian", "updates", "vector"])
    optimizer = optimizer_of(model, lr=0.0)
    for _ in range(6):
        optimizer.zero_grad()
        report = manager.step(model, optimizer, (model(torch.randn(4, 5, 8).double()) - 1).square().mean())
        gradient = ZEROS[name][1](model)
        assert gradient is not None
        assert float(gradient.abs().max()) < 1e-12
        optimizer.step()
        assert report.health.healthy
    assert manager.diagnose() == []
