"""Patches for the time of a training: replaced methods of one object, and a call after each backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable

from gradtrack.support.interrupts import Changes


def stand_in(changes: Changes, owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of one object, until the changes are undone."""
    there = vars(owner).get(name)

    def undo() -> None:
        if vars(owner).get(name) is not function:
            return  # another library has patched the method since then, and its function calls ours
        if there is None:
            delattr(owner, name)
        else:
            setattr(owner, name, there)

    changes.note(undo)
    setattr(owner, name, function)


def embrace(changes: Changes, owner: Any, name: str, context: Callable[[], AbstractContextManager[object]]) -> None:
    """Run a method of one object within a context manager, until the changes are undone."""
    method = getattr(owner, name)

    @wraps(method)
    def embraced(*arguments: Any, **keywords: Any) -> Any:
        with context():
            return method(*arguments, **keywords)

    stand_in(changes, owner, name, embraced)


class AfterBackward:
    """Calls a function once at the end of every backward pass that reaches one of the parameters, until it is undone.

    A framework that clips right after its backward pass leaves no other place from which the gradients can be seen as
    they were. The call is queued twice, because distributed training reduces the gradients in the first round.

    A checkpointed part of a model may run backward passes of its own within the pass, whose ends look the same from
    here. Where the outer pass can be embraced by `at_the_end`, they are passed over. While `listening` is false,
    only embraced passes count: the user may run others of their own.
    """

    def __init__(self, params: Iterable[nn.Parameter], call: Callable[[], object], changes: Changes) -> None:
        self._call = call
        self.params = list(params)
        self.listening = True
        self._queued = self._embraced = self._ended = False
        for param in self.params:
            if param.requires_grad:
                changes.hook(param.register_post_accumulate_grad_hook, self._reached)

    @contextmanager
    def at_the_end(self) -> Iterator[None]:
        """Call once when the block ends, however many passes end within it."""
        self._embraced, self._ended = True, False
        try:
            yield
        finally:
            self._embraced = False
        if self._ended:
            self._call()

    def reset(self) -> None:
        """Forget a backward pass that an exception ended."""
        self._queued = False

    def _reached(self, _: Tensor) -> None:
        if not self._queued and (self.listening or self._embraced):
            self._queued = True
            _queue(lambda: _queue(self._finish))

    def _finish(self) -> None:
        self._queued, self._ended = False, True
        if not self._embraced:
            self._call()


def _queue(call: Callable[[], Any]) -> None:
    engine: Any = Variable._execution_engine
    engine.queue_callback(call)
