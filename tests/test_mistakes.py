"""Calls that cannot mean anything, and what they are told."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradtrack
from gradtrack import GradientConfig, GradientFlowAnalyzer, GradientManager, safe_backward
from gradtrack.backends.memory import MemoryBackend
from gradtrack.errors import ClosedError, GradtrackError, InputTypeError, SecondBackwardError
from tests.training import batch_loss, optimizer_of, small_model


class Writer:
    """Something that writes scalars, as TensorBoard's writer does."""

    def add_scalar(self, *_: object) -> None:
        """Write."""


def closed() -> GradientManager:
    """Return a manager that is closed."""
    manager = GradientManager()
    manager.close()
    return manager


Call = Callable[[nn.Module, torch.optim.Optimizer, Tensor], object]
MISTAKES: dict[str, tuple[Call, str]] = {
    "a configuration for a manager": (
        lambda model, optimizer, loss: safe_backward(loss, model, optimizer, GradientConfig()),  # type: ignore[arg-type]
        "gradient_manager GradientConfig: expected a GradientManager",
    ),
    "model and loss in the wrong order": (
        lambda model, optimizer, loss: safe_backward(model, loss, optimizer, GradientManager()),  # type: ignore[arg-type]
        "loss Sequential: expected a tensor",
    ),
    "optimizer and loss in the wrong order": (
        lambda model, optimizer, loss: GradientManager().step(model, loss, optimizer, False),  # type: ignore[arg-type]
        "loss SGD: expected a tensor, a number or None. Mind the order",
    ),
    "a loss that no float holds": (
        lambda model, optimizer, loss: GradientManager().step(model, optimizer, 10**400, False),
        "loss of the type int is too large: expected a number that a float holds. Pass math.inf",
    ),
    "a complex loss": (
        lambda model, optimizer, loss: safe_backward(loss * 1j, model, optimizer),
        r"loss of torch.complex64: expected a real number.* Take loss.abs\(\) or loss.real",
    ),
    "a complex loss after a backward pass": (
        lambda model, optimizer, loss: GradientManager().step(model, optimizer, loss.detach() * 1j, False),
        "loss of torch.complex64: expected a real number",
    ),
    "a complex loss of a closure": (
        lambda model, optimizer, loss: (
            gradtrack.watch(model, optimizer),
            optimizer.step(lambda: (loss.backward(), loss.detach() * 1j)[1]),  # type: ignore[arg-type, no-untyped-call, return-value]
        ),
        "loss of torch.complex64: expected a real number",
    ),
    "a model for a configuration": (
        lambda model, optimizer, loss: GradientManager(model),  # type: ignore[arg-type]
        "config Sequential: expected a GradientConfig.* Model and optimizer go to safe_backward",
    ),
    "watch in the wrong order": (
        lambda model, optimizer, loss: gradtrack.watch(optimizer, model),  # type: ignore[arg-type]
        "model SGD: expected a torch.nn.Module",
    ),
    "watch without an optimizer": (
        lambda model, optimizer, loss: gradtrack.watch(model, []),
        r"optimizer \[\]: expected at least one",
    ),
    "a backend's class": (
        lambda model, optimizer, loss: GradientManager(backends=[MemoryBackend]),
        r"Pass an instance: MemoryBackend\(\)",
    ),
    "a backend alone": (
        lambda model, optimizer, loss: GradientManager(backends=MemoryBackend()),  # type: ignore[arg-type]
        r"expected a list. Write backends=\[\.\.\.\]",
    ),
    "an analyzer's class": (
        lambda model, optimizer, loss: GradientManager(analyzers=[GradientFlowAnalyzer]),
        r"Pass an instance: GradientFlowAnalyzer\(\)",
    ),
    "a tracker's own writer": (
        lambda model, optimizer, loss: GradientManager(backends=[Writer()]),
        "'name': 'tensorboard', 'writer'",
    ),
    "entering after the close": (
        lambda model, optimizer, loss: closed().__enter__(),
        "this GradientManager is closed",
    ),
    "following after the close": (
        lambda model, optimizer, loss: closed().follow(model, optimizer),
        "this GradientManager is closed",
    ),
    "a state that is none": (
        lambda model, optimizer, loss: GradientManager().load_state_dict(model.state_dict()),
        r"expected what manager.state_dict\(\) returned",
    ),
    "pickling": (lambda model, optimizer, loss: pickle.dumps(GradientManager()), r"Save manager.state_dict\(\)"),
    "copying": (lambda model, optimizer, loss: copy.deepcopy(GradientManager()), r"Save manager.state_dict\(\)"),
}


@pytest.mark.parametrize(("call", "text"), MISTAKES.values(), ids=MISTAKES.keys())
def test_what_a_mistake_is_told(call: Call, text: str) -> None:
    """The error is one of this package, short, and says what to do instead."""
    model = small_model()
    with pytest.raises(GradtrackError, match=text) as told:
        call(model, optimizer_of(model), batch_loss(model))
    assert len(str(told.value)) < 250
    assert isinstance(told.value, (TypeError, ValueError, ClosedError))


@pytest.mark.parametrize("state", [None, {}, []])
def test_no_state_at_all(state: Any) -> None:
    """Whatever is no state is refused and changes nothing."""
    with pytest.raises(InputTypeError, match="state_dict"):
        GradientManager().load_state_dict(state)


def test_a_backward_pass_of_ones_own() -> None:
    """An error about a graph that is used up says, in the text that a log has too, who uses it; torch's own follows."""
    model = small_model()
    loss = batch_loss(model)
    torch.autograd.backward(loss)
    with pytest.raises(SecondBackwardError, match=r"Leave out your own loss\.backward\(\).*backward=False") as told:
        safe_backward(loss, model, optimizer_of(model), GradientManager())
    assert isinstance(told.value, RuntimeError)
    assert "a second time" in str(told.value.__cause__)


def test_a_loss_of_an_earlier_step() -> None:
    """A hidden state that was not detached is named as the other cause, since then no call of the loop is too much."""
    model, state = small_model(), torch.ones(8, 6)
    optimizer, manager = optimizer_of(model), GradientManager(enable_gradient_clipping=False)
    carry = model(state).tanh()
    safe_backward(carry.square().mean(), model, optimizer, manager)
    with pytest.raises(SecondBackwardError, match="such as a hidden state: detach that"):
        safe_backward((carry + model(state)).square().mean(), model, optimizer, manager)


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_every_step_is_said_to_be_a_micro_batch(num_optimizers: int, caplog: pytest.LogCaptureFixture) -> None:
    """Where optimizers step eight times without a measured step, it is told once, and no hook stays."""
    model, manager = small_model(), GradientManager(backends=[])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    optimizers = optimizers if num_optimizers == 2 else [optimizer_of(model)]
    for step in range(20):
        told = [text for text in caplog.messages if "every call had accumulate=True" in text]
        assert len(told) == int(step > 8)
        safe_backward(batch_loss(model, step), model, optimizers, manager, accumulate=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    manager.close()
    assert "has stepped 8 times" in told[0]
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in optimizers)


@pytest.mark.parametrize("micro_batches", [2, 20])
def test_accumulation_as_it_should_be_is_silent(micro_batches: int, caplog: pytest.LogCaptureFixture) -> None:
    """However many micro-batches and steps there are, and the hook is gone after the first measured step."""
    model = small_model()
    optimizer = optimizer_of(model)
    with GradientManager(backends=[]) as manager:
        for index in range(1, 12 * micro_batches):
            accumulate = index % micro_batches != 0
            safe_backward(batch_loss(model) / micro_batches, model, optimizer, manager, accumulate=accumulate)
            if not accumulate:
                optimizer.step()
                optimizer.zero_grad()
        assert not optimizer._optimizer_step_post_hooks
    assert not [text for text in caplog.messages if "accumulate" in text]


def test_a_watched_step_that_is_shown_as_well_counts_once() -> None:
    """Where the manager of a watched optimizer is passed to `safe_backward` too, each step is one report."""
    model = small_model()
    optimizer = optimizer_of(model)
    manager = gradtrack.watch(model, optimizer, max_grad_norm=1e-3)
    for step in range(4):
        optimizer.zero_grad()
        if step < 3:
            safe_backward(batch_loss(model, step), model, optimizer, manager)
        else:
            torch.autograd.backward(batch_loss(model, step))
        optimizer.step()
    assert [report.step for report in manager.reports] == [1, 2, 3, 4]
    assert all(report.clipping.clipped for report in manager.reports)


@pytest.mark.parametrize("analyzers", [[], ["flow"], "auto"])
@pytest.mark.parametrize("steps_last", [True, False])
def test_a_watched_training_that_is_over_is_collected(analyzers: Any, steps_last: bool) -> None:
    """A manager that was never closed goes with the model and the optimizer that it watched."""
    model = small_model()
    optimizer = optimizer_of(model)
    manager = gradtrack.watch(model, optimizer, backends=[], analyzers=analyzers)
    for step in range(5):
        optimizer.zero_grad()
        torch.autograd.backward(batch_loss(model, step))
        if step < 4 or steps_last:
            optimizer.step()
    left = weakref.ref(manager)
    del model, optimizer, manager
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_watched_loop_without_a_step_is_told(set_to_none: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The ninth backward pass whose gradients replace unused ones says so, or the end where that cannot be known."""
    model = small_model()
    optimizer = optimizer_of(model)
    manager = gradtrack.watch(model, optimizer, backends=[])
    told = []
    for step in range(12):
        optimizer.zero_grad(set_to_none=set_to_none)
        torch.autograd.backward(batch_loss(model, step))
        told.append("no optimizer.step()" in caplog.text)
    manager.close()
    assert told == ([False] * 8 + [True] * 4 if set_to_none else [False] * 12)
    assert caplog.text.count("no optimizer.step()") == 1


def test_a_watched_loop_that_accumulates_first_is_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    """Gradients that add up may wait for their step, and a step that has come is never asked for again."""
    model = small_model()
    optimizer = optimizer_of(model)
    with gradtrack.watch(model, optimizer, backends=[]):
        for step in range(40):
            torch.autograd.backward(batch_loss(model, step))
        optimizer.step()
        for step in range(40):
            optimizer.zero_grad()
            torch.autograd.backward(batch_loss(model, step))
    assert "no optimizer.step()" not in caplog.text
