"""Offline runs: forward and backward passes of an analysis that leave the model as it was."""

from __future__ import annotations

import random
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradtrack.analyzers.tools.samples import read_together
from gradtrack.errors import InputTypeError, UsageError
from gradtrack.support.interrupts import Changes
from gradtrack.support.progress import counted

InputFunction = Callable[[], Any]
"""Gives a batch: a tensor, a tuple of positional arguments or a mapping of keyword arguments."""
LossFunction = Callable[[Any], Tensor]
"""Gives the loss of a model's output."""


@contextmanager
def untouched(model: nn.Module, optimizer: Any = None) -> Iterator[None]:
    """Put a model back as it was on leaving: weights, buffers, gradients, modes and the state of the random generators.

    In between nothing that is compiled runs as such.
    With an optimizer the steps in between are meant to train, so weights, buffers and gradients stay as they became.
    The random generators are forked around the whole of it, so that a random input still varies within.
    """
    modes = [(module, module.training) for module in model.modules()]
    wanted = [(param, param.requires_grad) for param in model.parameters()]
    found = [] if optimizer is not None else [(param, param.grad) for param in model.parameters()]
    gradients = [(param, grad, None if grad is None else grad.detach().clone()) for param, grad in found]

    def put_back() -> None:
        for module, training in modes:
            module.training = training
        for param, requires_grad in wanted:
            param.requires_grad_(requires_grad)
        with torch.no_grad():
            for param, gradient, copy in gradients:
                if gradient is not None and copy is not None:
                    gradient.copy_(copy)
                param.grad = gradient

    with _apart(model) if optimizer is not None else kept(model, weights=True), Changes() as changes:
        changes.note(put_back)
        yield


@contextmanager
def kept(model: nn.Module | None, *, weights: bool = False) -> Iterator[None]:
    """Put the random generators and the buffers of a model back, and its weights if asked, but not its gradients.

    What did not change is not written to, for a graph may hold it. A forward pass may assign buffers anew, so modules
    get back what they named so.
    """
    modules = [] if model is None else list(model.modules())
    tensors = [] if model is None else [*model.buffers(), *(model.parameters() if weights else ())]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors if not is_lazy(tensor)]  # which has no values yet
    held: list[Any] = [module._buffers for module in modules]
    buffers = [(names, dict(names)) for names in held if isinstance(names, dict)]  # those of a script are its own

    def put_back() -> None:
        for names, before in buffers:
            if names.keys() != before.keys() or any(names[name] is not before[name] for name in before):
                names.clear()
                names.update(before)
        with torch.no_grad():
            same = iter(read_together(tensor.eq(value).all() for tensor, value in values if not tensor.is_cpu))
            for tensor, value in values:
                if not (torch.equal(tensor, value) if tensor.is_cpu else next(same)):
                    tensor.copy_(value)

    with _apart(model), Changes() as changes:
        changes.note(put_back)
        yield


def offline_steps(
    model: nn.Module, input_fn: InputFunction, loss_fn: LossFunction, steps: int, optimizer: Any = None
) -> Iterator[tuple[int, Any, Any, Tensor]]:
    """Run forward and backward passes, each with a fresh batch, and yield (step, inputs, output, loss) after each.

    The model trains on them only where an optimizer is passed. Use it inside `untouched`.
    """
    if steps < 1:
        raise UsageError(f"steps {steps}: expected at least 1.")
    check_functions(input_fn, loss_fn)
    for step in counted(range(1, steps + 1), "Analyzing", total=steps):
        model.zero_grad(set_to_none=True)
        inputs = input_fn()
        output = call(model, inputs)
        loss: object = loss_fn(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(f"loss_fn returned {loss!r}: expected a single number that depends on the model's output.")
        torch.autograd.backward(loss)
        yield step, inputs, output, loss
        if optimizer is not None:
            optimizer.step()


def check_functions(input_fn: object, loss_fn: object) -> None:
    """Refuse a batch or a loss in place of the function that gives it."""
    for name, given in (("input_fn", input_fn), ("loss_fn", loss_fn)):
        if not callable(given):
            raise InputTypeError(
                f"{name} is {type(given).__name__}: expected a function. Pass one that is called at every step."
            )


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model with a batch as `input_fn` returns it."""
    if isinstance(inputs, (dict, UserDict)):  # as a tokenizer returns it
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@contextmanager
def _apart(model: nn.Module | None) -> Iterator[None]:
    """Run without compiled graphs, and put the random generators of torch, NumPy and Python back on leaving.

    Compiled graphs call no hook that came later, and are not differentiable twice.
    """
    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), ExitStack() as stack, Changes() as changes:
        if "torch._dynamo" in sys.modules:  # without which nothing was compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        changes.note(partial(random.setstate, random.getstate()))
        changes.note(partial(np.random.set_state, np.random.get_state()))
        yield
