"""The loss of a watched loop, which passes none: it is that of which `backward()` was called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradtrack
from tests.step.test_own_clipping import a_model, loss_of

ORIGINAL = torch.autograd.backward


def losses(manager: Any) -> list[float]:
    """Return the losses of all reports."""
    return [report.loss for report in manager.reports]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_the_loss_is_the_sum_over_a_step(micro_batches: int, to_none: bool, clips: bool) -> None:
    """Every micro-batch counts, whatever else is computed, and what was changed of torch is put back."""
    model, other = a_model(), a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    manager, expected = gradtrack.watch(model, optimizer, backends=[]), []
    for step in range(5):
        found = [loss_of(model, step + index) for index in range(micro_batches)]
        for loss in found:
            loss.backward()  # type: ignore[no-untyped-call]
        loss_of(other, step).backward()  # type: ignore[no-untyped-call]
        torch.autograd.grad(loss_of(model, step), list(model.parameters()))
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        expected.append(sum(loss.item() for loss in found))
    manager.close()
    assert losses(manager) == pytest.approx(expected, rel=1e-6)
    assert torch.autograd.backward is ORIGINAL


def test_each_part_of_a_gan_has_its_own_loss() -> None:
    """What the generator sends through the critic is no loss of the critic, nor the other way round."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (generator, critic)]
    managers = [
        gradtrack.watch(model, optimizer, backends=[])
        for model, optimizer in zip((generator, critic), optimizers, strict=True)
    ]
    expected: list[list[float]] = [[], []]
    for _ in range(4):
        optimizers[1].zero_grad()
        real, fake = critic(torch.randn(3, 4)).mean(), critic(generator(torch.randn(3, 2)).detach()).square().mean()
        real.backward()
        fake.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        own = critic(generator(torch.randn(3, 2))).mean()
        own.backward()
        optimizers[0].step()
        expected[0].append(own.item())
        expected[1].append(real.item() + fake.item())
    for manager in managers:
        manager.close()
    assert [losses(manager) for manager in managers] == [pytest.approx(found, rel=1e-6) for found in expected]


def test_a_scaled_loss_is_told_as_it_was() -> None:
    """A loss scaler multiplies the loss for the backward pass only."""
    model, scaler, expected = a_model(), torch.amp.GradScaler("cpu", init_scale=8.0), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    manager = gradtrack.watch(model, optimizer, backends=[])
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        expected.append(loss.item())
    manager.close()
    assert losses(manager) == pytest.approx(expected, rel=1e-6)


def test_frozen_parameters_are_asked_nothing() -> None:
    """The gradient of a head tells of the loss where all before it is frozen."""
    model = nn.Sequential(*(nn.Linear(4, 4).requires_grad_(False) for _ in range(6)), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    manager = gradtrack.watch(model, optimizer, backends=[])
    loss = loss_of(model, 1)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    manager.close()
    assert losses(manager) == [pytest.approx(loss.item(), rel=1e-6)]


def test_what_is_no_number_is_no_loss() -> None:
    """A backward pass with gradients of its own has no loss, and a manager that is forgotten hears nothing."""
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    manager = gradtrack.watch(model, optimizer, backends=[])
    output: Tensor = model(torch.ones(2, 4))
    output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]
    optimizer.step()
    manager.close()
    assert losses(manager) == [None]
