"""The moment when an optimizer takes its gradients."""

import pytest
import torch
from torch import Tensor, nn

from gradtrack.analyzers.tools.optimizer_hooks import StepWatch
from tests.training import batch_loss, optimizer_of, small_model


def watched(*, running: bool = False) -> tuple[StepWatch, torch.optim.Optimizer, nn.Module]:
    """Return a watch on the optimizer of a model that has gradients."""
    model = small_model()
    optimizer = optimizer_of(model)
    torch.autograd.backward(batch_loss(model))
    watch = StepWatch()
    watch.add(optimizer, running=running)
    return watch, optimizer, model


def test_who_waits_is_called_once() -> None:
    """The next step calls, and the one after it does not."""
    watch, optimizer, model = watched()
    before = next(model.parameters()).detach().clone()
    seen: list[bool] = []
    watch.call_before_step(lambda: seen.append(torch.equal(next(model.parameters()), before)))
    assert seen == []
    optimizer.step()
    optimizer.step()
    assert seen == [True]


@pytest.mark.parametrize("first", [False, True])
def test_a_hook_of_the_same_step_may_wait(first: bool) -> None:
    """Who asks from within a step's own hooks is called in that step, whichever hook comes first."""
    optimizer = optimizer_of(small_model())
    watch = StepWatch()
    seen: list[int] = []
    if first:
        watch.add(optimizer)
    optimizer.register_step_pre_hook(lambda *_: watch.call_before_step(lambda: seen.append(1)))
    if not first:
        watch.add(optimizer)
    for count in (1, 2, 3):
        optimizer.step()
        assert len(seen) == count


def test_a_watch_that_begins_in_a_step_sees_the_next_one() -> None:
    """An optimizer that is hooked by one of its hooks goes on, and is seen from its next step on."""
    _, optimizer, _ = watched()
    watch = StepWatch()
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: watch.add(optimizer, running=True))
    for step in range(3):
        watch.call_before_step(lambda step=step: seen.append(step))  # type: ignore[misc]
        optimizer.step()
    assert seen == [1, 2]


def test_what_comes_after_a_look_in_a_closure_is_seen() -> None:
    """Who asks from within a closure is called when it is over, when others have changed the gradients."""
    watch, optimizer, model = watched()
    seen: list[float] = []
    grads = [param.grad for param in model.parameters() if param.grad is not None]

    def closure() -> Tensor:
        watch.call_before_step(lambda: seen.append(float(sum(grad.abs().sum() for grad in grads))))
        for grad in grads:
            grad.zero_()
        return torch.zeros(())

    optimizer.step(closure)  # type: ignore[arg-type]
    assert seen == [0.0]


def test_a_closure_that_raises_ends_its_step() -> None:
    """Both ends of a step are told, also where its closure fails."""
    model = small_model()
    optimizer, told = optimizer_of(model), []
    watch = StepWatch(lambda: told.append("began"), lambda: told.append("ended"))
    watch.add(optimizer)

    def closure() -> Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    assert told == ["began", "ended"]
    watch.close()
    optimizer.step()
    assert told == ["began", "ended"]


def test_a_watch_goes_behind_the_other_hooks() -> None:
    """After the first step who waits is called when the hooks that were there are done, and still just once a step."""
    watch, optimizer, _ = watched()
    order: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: order.append("other"))
    for _ in range(3):
        watch.call_before_step(lambda: order.append("look"))
        optimizer.step()
    assert order == ["look", "other", "other", "look", "other", "look"]
    watch.close()
    assert len(optimizer._optimizer_step_pre_hooks) == 1
