"""Permanent hooks on optimizers, which call functions just before an optimizer takes its gradients."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from gradtrack.support.interrupts import Changes

Look = Callable[[], None]


class _State(enum.Enum):
    """Where the optimizers are: between two steps, in a closure that makes gradients, or past all gradients."""

    IDLE = enum.auto()
    IN_CLOSURE = enum.auto()
    TAKEN = enum.auto()


class StepWatch:
    """Hooks on optimizers that call waiting functions just before an optimizer takes its gradients.

    The hooks stay on until `close`: torch walks through them during a step and breaks where one comes or goes then, and
    a waiting function may have been called by one of them. `began` and `ended` are called around every step, the latter
    also where a closure raises.
    """

    def __init__(self, began: Look | None = None, ended: Look | None = None) -> None:
        self._began, self._ended = began, ended
        self._state = _State.IDLE
        self._waiting: Look | None = None
        self._closed = False
        self._ends: dict[int, tuple[Any, Changes]] = {}
        self._begins: dict[int, tuple[Any, Changes]] = {}
        self._last: set[int] = set()

    def add(self, optimizer: Any, *, running: bool = False) -> None:
        """Hook an optimizer; one that may be running its other hooks now is seen from its next step on."""
        if id(optimizer) not in self._ends:
            self._ends[id(optimizer)] = optimizer, Changes()
            self._ends[id(optimizer)][1].hook(optimizer.register_step_post_hook, uncompiled(self._after_step))
        if not running and id(optimizer) not in self._begins:
            self._hook_begin(optimizer)

    def call_before_step(self, look: Look) -> None:
        """Call a function once, before gradients are next taken: at once where the running step takes no more."""
        if self._state is _State.TAKEN:
            look()
        else:
            self._waiting = look

    def close(self) -> None:
        """Remove every hook for good, and forget the waiting functions."""
        self._closed = True
        take_off([*self._ends.values(), *self._begins.values()])
        self._waiting, self._state = None, _State.IDLE
        for known in (self._ends, self._begins, self._last):
            known.clear()

    def _hook_begin(self, optimizer: Any) -> None:
        self._begins[id(optimizer)] = optimizer, Changes()
        self._begins[id(optimizer)][1].hook(optimizer.register_step_pre_hook, uncompiled(self._before_step))

    def _after_step(self, optimizer: Any, *_: object) -> None:
        if self._closed:
            return
        self._end()
        if id(optimizer) not in self._last:  # go behind the hooks that are there by now, which may look or clip
            self._last.add(id(optimizer))
            if id(optimizer) in self._begins:
                self._begins[id(optimizer)][1].undo()
            self._hook_begin(optimizer)

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._closed:
            return None
        if self._began is not None:
            self._began()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._take()
            return None
        self._state = _State.TAKEN  # until the closure is called, and after it
        return (args[0],), {**kwargs, "closure": lambda: self._call(closure)}

    def _call(self, closure: Callable[[], Any]) -> Any:
        self._state = _State.IN_CLOSURE
        try:
            loss = closure()
        except BaseException:
            self._end()
            raise
        self._take()
        return loss

    def _take(self) -> None:
        self._state = _State.TAKEN
        look, self._waiting = self._waiting, None
        if look is not None:
            look()

    def _end(self) -> None:
        """Note that a step is over; a function that still waits has missed its gradients."""
        self._state, self._waiting = _State.IDLE, None
        if self._ended is not None:
            self._ended()


def uncompiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is never compiled, nor anything that it calls, wherever it is called from.

    Torch's own wrapper would cost several microseconds at each call.
    """
    apart: Callable[..., Any] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]

    def choose(*args: Any, **kwargs: Any) -> Any:
        return apart(*args, **kwargs) if torch.compiler.is_compiling() else call(*args, **kwargs)

    return choose


def take_off(hooks: Iterable[tuple[Any, Changes]]) -> None:
    """Remove hooks of optimizers, except of one that runs its hooks just now: there they stay, and do nothing.

    Torch breaks where a hook goes while it walks. Each hook comes with its optimizer, and knows itself that it is over.
    """
    for optimizer, hook in hooks:
        if not is_stepping(optimizer):
            hook.undo()


def is_stepping(optimizer: Any) -> bool:
    """Say whether an optimizer's step is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False
