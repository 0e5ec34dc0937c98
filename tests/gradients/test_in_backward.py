"""Optimizers that step inside the backward pass leave no gradient behind; hooks measure it before the step."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrack import GradientManager
from tests.training import batch_loss, small_model

# Importing the optimizers that step in the backward pass warns of others in the same package.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def by_torch(model: nn.Module) -> Any:
    """Give every parameter an optimizer of its own, as torch does it."""
    found: Any = importlib.import_module("torch.distributed.optim.apply_optimizer_in_backward")
    found._apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return found._get_in_backward_optimizers(model)


def by_hand(model: nn.Module) -> Any:
    """Give every parameter an optimizer of its own, as a loop does it by hooks."""
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    return list(optimizers.values())


@pytest.mark.parametrize(("prepare", "unseen"), [(by_torch, 0), (by_hand, 1)])
def test_norms_and_weights_are_those_of_an_ordinary_loop(prepare: Callable[[Any], Any], unseen: int) -> None:
    """Torch's own optimizers are known at once, hooks of a loop's own after the first step that they left bare."""
    model, twin = small_model(), small_model()
    optimizers, optimizer = prepare(model), torch.optim.SGD(twin.parameters(), lr=0.1)
    manager = GradientManager(track_parameters=True, grad_log_every_n_steps=1, analyzers=["flow", "updates"])
    plain = GradientManager(track_parameters=True, grad_log_every_n_steps=1, enable_gradient_clipping=False)
    for step in range(6):
        manager.step(model, optimizers, batch_loss(model, step))
        plain.step(twin, optimizer, batch_loss(twin, step))
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(manager.reports[unseen:], plain.reports[unseen:], strict=True):
        assert one.statistics == other.statistics
        assert one.parameters == other.parameters
        assert one.clipping.norm_before == other.clipping.norm_before
        assert not one.clipping.enabled
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))
    assert [bool("inside the backward" in str(one.notes)) for one in manager.reports] == [True] + [False] * 5


def test_what_is_not_finite_is_named() -> None:
    """A NaN is reported with its parameter, and not called skipped, since it has been stepped with."""
    model = small_model()
    report = GradientManager().step(model, by_torch(model), batch_loss(model, scale=math.nan))
    assert (report.nan_inf.action, report.skipped) == ("report", False)
    assert {entry.name for entry in report.nan_inf.parameters} == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_closing_takes_the_hooks_off() -> None:
    """A closed manager leaves the parameters as it found them."""
    model = small_model()
    with GradientManager() as manager:
        manager.step(model, by_torch(model), batch_loss(model))
        assert all(param._post_accumulate_grad_hooks for param in model.parameters())
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"spike_action": "skip"}, "spike_action cannot act"),
        ({"skip_steps": [[2, 3]]}, "skip_steps cannot act"),
        ({"spike_action": "clip", "skip_steps": [[2, 3]]}, "spike_action and skip_steps cannot act"),
        ({}, None),
    ],
)
def test_settings_that_leave_steps_out_say_once_that_they_cannot(settings: dict[str, Any], named: str | None) -> None:
    """The weights have changed before any step is judged."""
    model, manager = small_model(), GradientManager(**settings)
    optimizers = by_torch(model)
    for step in range(5):
        manager.step(model, optimizers, batch_loss(model, step))
    notes = [note for report in manager.reports for note in report.notes if "cannot act" in note]
    assert [note.startswith(named or "") for note in notes] == [True] * (named is not None)
    assert not any(report.skipped for report in manager.reports)
