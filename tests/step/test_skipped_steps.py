"""A skipped step is none for any optimizer: no state, no group and no weight changes, and the next one steps again."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from gradtrack import GradientManager, safe_backward
from tests.training import batch_loss, small_model


class Restless(torch.optim.Optimizer):
    """Counts its calls, in its groups and in itself, and decays weights without a gradient; its step may raise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})
        self.num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move."""
        self.num_steps += 1
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                param.data.mul_(0.9).sub_(param.grad, alpha=group["lr"])  # fails without a gradient


class Wrapper:
    """An optimizer within another object, as frameworks have it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.num_calls = optimizer, 0

    @property
    def param_groups(self) -> Any:
        """Those of the optimizer."""
        return self.optimizer.param_groups

    def step(self) -> None:
        """Step it."""
        self.num_calls += 1
        self.optimizer.step()


def spoiled(model: torch.nn.Module, step: int, *, bad: bool) -> Tensor:
    """Return a loss, infinite on a bad step."""
    return batch_loss(model, step) * (math.inf if bad else 1.0)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_restless_optimizer_rests(wrapped: bool) -> None:
    """Its counts and weights stay, and the step after the skipped one is made."""
    model, manager = small_model(), GradientManager()
    inner = Restless(model.parameters())
    optimizer: Any = Wrapper(inner) if wrapped else inner
    for step in range(6):
        before = copy.deepcopy([list(model.parameters()), inner.num_steps, inner.param_groups[0]["k"]])
        bad = step in (2, 3)
        inner.zero_grad()
        report = safe_backward(spoiled(model, step, bad=bad), model, optimizer, manager)
        optimizer.step()
        assert report.skipped == bad
        unchanged = all(map(torch.equal, before[0], model.parameters()))
        assert unchanged == bad
        assert (inner.num_steps == before[1]) == (inner.param_groups[0]["k"] == before[2]) == bad
    assert inner.num_steps == 4
    assert "step" not in vars(inner)


def test_a_loop_that_goes_on_without_a_step_loses_none() -> None:
    """Where the loop itself leaves the step out, the next one is made."""
    model, manager = small_model(), GradientManager()
    optimizer = Restless(model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        if safe_backward(spoiled(model, step, bad=step == 2), model, optimizer, manager).skipped:
            continue
        optimizer.step()
    assert optimizer.num_steps == 4


def test_a_schedule_is_not_upset() -> None:
    """A scheduler neither warns of a step that was replaced nor of one that it does not see."""
    model, manager = small_model(), GradientManager()
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            optimizer.zero_grad()
            safe_backward(spoiled(model, step, bad=step == 0), model, optimizer, manager)
            optimizer.step()
            schedule.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_hooks_of_a_skipped_step_run() -> None:
    """Those who count steps of the optimizer by hooks see all of them."""
    model, manager = small_model(), GradientManager()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for step in range(3):
        optimizer.zero_grad()
        safe_backward(spoiled(model, step, bad=step == 1), model, optimizer, manager)
        optimizer.step()
    assert calls == ["pre", "post"] * 3


def test_a_step_that_is_running_is_not_replaced() -> None:
    """Where gradtrack looks within the step, as `watch` does, no later step is lost."""
    model, manager = small_model(), GradientManager()
    optimizer = torch.optim.Adam(model.parameters())
    manager.follow(model, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        torch.autograd.backward(spoiled(model, step, bad=step == 2))
        optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}
    assert manager.get_training_summary().nan_inf_summary.skipped_steps == 1


def test_closing_gives_the_step_back() -> None:
    """A manager that is closed between a skip and the step leaves the optimizer as it was."""
    model, manager = small_model(), GradientManager()
    optimizer = Restless(model.parameters())
    safe_backward(spoiled(model, 0, bad=True), model, optimizer, manager)
    assert "step" in vars(optimizer)
    manager.close()
    assert "step" not in vars(optimizer)


def test_a_skip_leaves_zeros_to_read() -> None:
    """A loop that steps by hand moves nothing, one that clips reads a norm of zero, and the report has the NaN."""
    model, manager = small_model(), GradientManager()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # which only names the parameters
    before = copy.deepcopy(list(model.parameters()))
    report = safe_backward(spoiled(model, 0, bad=True), model, optimizer, manager)
    assert report.skipped
    assert report.nan_inf.nan_count + report.nan_inf.inf_count > 0
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 0.0
    for param in model.parameters():
        param.data.add_(param.grad, alpha=-0.1)  # type: ignore[arg-type]
    assert all(map(torch.equal, before, model.parameters()))


def test_a_callback_that_raises_leaves_zeros_as_well() -> None:
    """A program that goes on after the exception, and steps by hand, moves nothing by what is not finite."""

    def stop(*_: object) -> None:
        raise RuntimeError("enough")

    model, manager = small_model(), GradientManager()
    manager.on_issue(stop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="enough"):
        safe_backward(spoiled(model, 0, bad=True), model, optimizer, manager)
    assert all(float(param.grad.abs().sum()) == 0.0 for param in model.parameters() if param.grad is not None)


def test_a_step_that_was_kept_from_before_finds_no_gradient() -> None:
    """A bound method goes past what stands in its place: momentum moves nothing, and the next step is whole."""
    model, manager = small_model(), GradientManager()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step_it = optimizer.step
    for step in range(5):
        before = copy.deepcopy(list(model.parameters()))
        optimizer.zero_grad()
        report = safe_backward(spoiled(model, step, bad=step == 3), model, optimizer, manager)
        step_it()
        assert all(map(torch.equal, before, model.parameters())) == report.skipped == (step == 3)


def test_a_skip_within_a_running_step_takes_the_gradients_away() -> None:
    """As `watch` looks then, the step can no longer be replaced; without gradients it moves nothing."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    manager = GradientManager()
    manager.follow(model, optimizer)
    torch.autograd.backward(spoiled(model, 0, bad=True))
    before = copy.deepcopy(list(model.parameters()))
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("settings", [{"skip_steps": [[50, 50]]}, {"spike_action": "skip"}])
def test_a_finite_step_that_the_loop_leaves_out_holds_back_no_other(settings: dict[str, Any]) -> None:
    """Quiet steps go a shorter way, which must not begin while an optimizer is held back."""
    model, manager = small_model(), GradientManager(engine="native", backends=[], **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    still, skipped = [], []
    for step in range(1, 121):
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        loss = batch_loss(model, step % 8, scale=300.0 if step == 100 and "spike_action" in settings else 1.0)
        if safe_backward(loss, model, optimizer, manager).skipped:
            skipped.append(step)
            continue
        optimizer.step()
        still += [step] if all(map(torch.equal, before, model.parameters())) else []
    assert skipped == [100 if "spike_action" in settings else 50]
    assert still == []
