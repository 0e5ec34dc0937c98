"""The same numbers and weights however a loop runs its backward pass, its optimizer and its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradtrack import GradientManager
from tests.training import batch_loss, small_model

STEPS = 6


def train(
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    manager: GradientManager | None = None,
    clip: Callable[[list[Tensor]], Any] = lambda params: nn.utils.clip_grad_norm_(params, 0.05),
    set_to_none: bool = True,
) -> tuple[list[float | None], list[Tensor]]:
    """Train with gradtrack's clipping or, without a manager, with torch's; return the norms and the weights."""
    model = small_model()
    norms: list[float | None] = []
    optimizer = make_optimizer(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = batch_loss(model, step)
        if manager is None:
            torch.autograd.backward(loss)
            norms.append(float(clip(list(model.parameters()))))
        else:
            norms.append(manager.step(model, optimizer, loss).clipping.norm_before)
        optimizer.step()
    return norms, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_optimizers_of_every_implementation(kind: Any, options: dict[str, Any], set_to_none: bool) -> None:
    """Clipping is torch's own, for fused, foreach and plain optimizers, with gradients that are kept or let go."""

    def make(params: Any) -> torch.optim.Optimizer:
        return kind(params, lr=0.01, **options)  # type: ignore[no-any-return]

    expected, weights = train(make, set_to_none=set_to_none)
    norms, found = train(make, manager=GradientManager(max_grad_norm=0.05), set_to_none=set_to_none)
    assert norms == pytest.approx(expected, rel=1e-5)
    for one, other in zip(found, weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("foreach", [True, False])
def test_torchs_clipping_after_the_look_changes_nothing(foreach: bool) -> None:
    """What gradtrack has clipped is within the limit of torch's function, in both of its implementations."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    GradientManager(max_grad_norm=0.05).step(model, optimizer, batch_loss(model))
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=foreach)
    after = [param.grad for param in model.parameters() if param.grad is not None]
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other)


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in the backward pass."""

    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)])
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the layers, checkpointed or not."""
        for layer in self.layers:
            inputs = (
                layer(inputs) if self.reentrant is None else checkpoint(layer, inputs, use_reentrant=self.reentrant)
            )
        return inputs


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("analyzers", [[], ["flow", "gain", "vector"]])
def test_gradient_checkpointing_in_both_modes(reentrant: bool, analyzers: list[str]) -> None:
    """What is computed again is not measured twice: reports and weights are those without checkpoints."""
    outcomes = []
    for mode in (None, reentrant):
        model = Checkpointed(reentrant=mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        with GradientManager(analyzers=analyzers, max_grad_norm=0.05) as manager:
            manager.attach(model, optimizer)
            for _ in range(9):
                optimizer.zero_grad()
                manager.step(model, optimizer, model(torch.ones(3, 6, requires_grad=True)).square().mean())
                optimizer.step()
            dumps = [report.model_dump(exclude={"time"}) for report in manager.reports]
        outcomes.append((dumps, [param.detach().clone() for param in model.parameters()]))
    (plain, weights), (again, same) = outcomes
    assert [dump["clipping"] for dump in again] == [dump["clipping"] for dump in plain]
    assert [dump["statistics"] for dump in again] == [dump["statistics"] for dump in plain]
    assert [sorted(dump["analyzers"]) for dump in again] == [sorted(dump["analyzers"]) for dump in plain]
    assert all(torch.equal(one, other) for one, other in zip(weights, same, strict=True))


def test_the_noise_scale_is_measured_only_when_asked_for() -> None:
    """Micro-batches are told apart by the vector analyzer, and without it nothing hooks a parameter."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for analyzers in ([], ["vector"]):
        manager = GradientManager(analyzers=analyzers)
        for _ in range(2):
            for part in range(4):
                hooked = any(param._post_accumulate_grad_hooks for param in model.parameters())
                report = manager.step(model, optimizer, batch_loss(model, part), accumulate=part < 3)
            optimizer.zero_grad()
        assert hooked == bool(analyzers)
        found = report.analyzers.get("vector")
        assert (found is not None and found["noise_scale"] is not None) == bool(analyzers)
        manager.close()
