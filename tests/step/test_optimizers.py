"""The optimizers of a pair: rates, closures, and hooks before their steps."""

import math

import pytest
import torch
from torch import Tensor, nn

import gradtrack
from gradtrack import GradientManager
from gradtrack.errors import UsageError
from gradtrack.gradients.parameters import ParameterTable
from gradtrack.step.optimizers import PairOptimizers
from tests.training import batch_loss, optimizer_of, small_model


def stepping(model: nn.Module, *optimizers: object) -> PairOptimizers:
    """Bind optimizers to a model."""
    made = PairOptimizers()
    made.bind(optimizers, ParameterTable(model))
    return made


def test_a_rate_that_changes_in_place_is_copied() -> None:
    """Recorded rates stay those of their step, also if a schedule changes a tensor in place."""
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.5)
    made = stepping(model, torch.optim.Adam([{"params": model.parameters(), "lr": rate, "name": "all"}], foreach=True))
    rates = made.rates()
    rate.fill_(0.125)
    [[(name, value)]] = rates
    assert (name, float(value)) == ("all", 0.5)


def test_a_report_has_the_rate_of_its_step() -> None:
    """With a schedule, whenever it is read."""
    manager, model = GradientManager(), small_model()
    optimizer = optimizer_of(model)
    reports = []
    for step, rate in enumerate([0.1, 0.1, 0.05, 0.1]):
        optimizer.param_groups[0]["lr"] = rate
        model.zero_grad()
        reports.append(manager.step(model, optimizer, batch_loss(model, step)))
    assert [report.lr["0"] for report in reports] == [0.1, 0.1, 0.05, 0.1]


def test_a_closure_is_one_step() -> None:
    """Only the first of the looks from within an optimizer's closure begins a step."""
    model = nn.Linear(2, 1)
    optimizer = optimizer_of(model, torch.optim.LBFGS, max_iter=3)
    made = stepping(model, optimizer)
    again: list[bool] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(4, 2)).square().sum()
        torch.autograd.backward(loss)
        again.append(made.calls_again())
        return loss

    for _ in range(2):
        again.clear()
        optimizer.step(closure)
        assert len(again) > 1
        assert again[0] is False
        assert all(again[1:])


def test_another_optimizer_ends_the_counting_of_calls() -> None:
    """After an optimizer with a closure, one without makes a step of every look."""
    model = nn.Linear(2, 1)
    made = stepping(model, optimizer_of(model, torch.optim.LBFGS))
    assert not made.calls_again()
    assert made.calls_again()
    made.bind([optimizer_of(model)], ParameterTable(model))
    assert [made.calls_again() for _ in range(3)] == [False] * 3


def test_a_closure_that_raises_ends_its_step() -> None:
    """The look after a closure that failed begins a step of its own."""
    model = nn.Linear(2, 1)
    optimizer = optimizer_of(model, torch.optim.LBFGS)
    made = stepping(model, optimizer)

    def closure() -> Tensor:
        made.calls_again()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    assert not made.calls_again()


def test_flags_are_taken_back_once() -> None:
    """An optimizer loses the flag of a step on the device, and keeps one that other code has set."""
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    made = stepping(model, optimizer)
    optimizer.found_inf = torch.ones(())
    made.forget_found_inf()
    assert hasattr(optimizer, "found_inf")
    made.may_hold_found_inf = True
    made.close()
    assert not hasattr(optimizer, "found_inf")


def test_a_stranger_is_refused() -> None:
    """An optimizer of another model is refused, and the one before it stays."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    made = stepping(model, own)
    with pytest.raises(UsageError, match="owns none of the model's trainable parameters"):
        made.bind([torch.optim.SGD(other.parameters(), lr=0.1)], ParameterTable(model))
    assert made.optimizers == (own,)
    assert list(made.params()) == list(model.parameters())


@pytest.mark.parametrize("analyzers", [[], ["flow", "updates"]])
@pytest.mark.parametrize("mine_first", [False, True])
def test_a_watching_manager_may_be_closed_within_a_step(mine_first: bool, analyzers: list[str]) -> None:
    """A hook before or after ours closes the manager: the step goes on, and nothing is looked at any more."""
    model = small_model()
    optimizer = optimizer_of(model, torch.optim.Adam)
    made: list[gradtrack.GradientManager] = []
    closing = False

    def close(*_: object) -> None:
        if closing:
            made[0].close()

    if mine_first:
        optimizer.register_step_pre_hook(close)
    made.append(gradtrack.watch(model, optimizer, analyzers=analyzers))
    if not mine_first:
        optimizer.register_step_pre_hook(close)
    optimizer.register_step_pre_hook(lambda *_: None)
    for step in range(6):
        closing = step == 3
        optimizer.zero_grad()
        torch.autograd.backward(batch_loss(model, step))
        optimizer.step()
    assert len(made[0].reports) == (3 if mine_first else 4)
    assert optimizer.state[next(model.parameters())]["step"] == 6


def test_a_callback_may_close_the_manager_that_calls_it() -> None:
    """An issue that opens within the watched step may be the end of the watching, not of the step."""
    model = small_model()
    optimizer = optimizer_of(model)
    manager = gradtrack.watch(model, optimizer, analyzers=["flow"], nonfinite_action="skip")
    manager.on_issue(lambda *_: manager.close())
    optimizer.register_step_pre_hook(lambda *_: None)
    for scale in (1.0, math.nan, 1.0):
        optimizer.zero_grad()
        torch.autograd.backward(batch_loss(model, scale=scale))
        optimizer.step()
    assert [report.skipped for report in manager.reports] == [False, True]
    assert all(torch.isfinite(param).all() for param in model.parameters())


def test_optimizers_that_step_at_times_are_looked_at_before_the_first() -> None:
    """Where one of several leaves out a step, the next look is before whichever steps first, and each step is one."""
    model = small_model()
    every, seldom = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[2], model[0]))
    manager = gradtrack.watch(model, [seldom, every], max_grad_norm=1e-3)
    for step in range(6):
        model.zero_grad()
        torch.autograd.backward(batch_loss(model, step))
        for optimizer in (seldom, every) if step % 3 != 1 else (every,):
            grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
            optimizer.step()
            assert float(torch.nn.utils.get_total_norm(grads)) <= 1e-3
    assert [report.step for report in manager.reports] == [1, 2, 3, 4, 5, 6]
    assert all(report.clipping.clipped for report in manager.reports)


def test_a_group_without_a_numeric_rate_has_none() -> None:
    """As Adafactor's default, None, by which it finds its own."""
    model = small_model()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(
        [{"params": params[:2], "name": "first"}, {"params": params[2:], "name": "rest"}], lr=0.1
    )
    optimizer.param_groups[0]["lr"] = None
    manager = GradientManager()
    for step in range(80):
        optimizer.zero_grad()
        report = manager.step(model, optimizer, batch_loss(model, step % 4))
    assert report.lr == {"rest": 0.1}


def test_gradients_outside_of_a_closure_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """LBFGS computes its own, so the loop is told to call safe_backward within the closure."""
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    manager, notes = GradientManager(), list[str]()
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = batch_loss(model, step)
            torch.autograd.backward(loss)
            return loss

        notes += manager.step(model, optimizer, closure(), backward=False).notes
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    assert [note for note in notes if "within the closure" in note] == [
        message for message in caplog.messages if "within the closure" in message
    ]
    assert len([note for note in notes if "within the closure" in note]) == 1


def test_a_skip_leaves_gradients_of_other_optimizers_alone() -> None:
    """A parameter of the model that an optimizer owns which was never attached keeps its gradient."""
    model = small_model()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    torch.autograd.backward(batch_loss(model) * float("inf"))
    assert GradientManager().step(model, first, None, backward=False).skipped
    assert not any(param.grad.any() for group in first.param_groups for param in group["params"])
    assert all(param.grad.any() for group in second.param_groups for param in group["params"])
