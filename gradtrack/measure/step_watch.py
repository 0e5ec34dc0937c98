"""Lasting hooks on optimizers, which tell when the gradients are taken."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

Look = Callable[[], None]


class _State(enum.Enum):
    """Where the optimizers are: between two steps, in a closure that makes gradients, or past all gradients."""

    IDLE = enum.auto()
    IN_CLOSURE = enum.auto()
    TAKEN = enum.auto()


class StepWatch:
    """Calls whoever waits for the moment when an optimizer takes its gradients.

    The hooks stay on until `close`: torch walks through them during a step and breaks where one comes or goes then, and
    whoever waits may have been called by one of them. `began` and `ended` are called around every step, the latter
    also where a closure raises.
    """

    def __init__(self, began: Look = lambda: None, ended: Look = lambda: None) -> None:
        self._began, self._ended = began, ended
        self._state = _State.IDLE
        self._waiting: Look | None = None
        self._hooks: list[Any] = []
        self._hooked: set[int] = set()

    def add(self, optimizer: Any, *, running: bool = False) -> None:
        """Hook an optimizer, once; one that may be running its other hooks now is seen from its next step on."""
        if id(optimizer) in self._hooked:
            return
        self._hooked.add(id(optimizer))
        begun = not running
        if begun:
            self._hook_begin(optimizer)

        def after_step(*_: object) -> None:
            nonlocal begun
            self._end()
            if not begun:
                begun = True
                self._hook_begin(optimizer)

        self._hooks.append(optimizer.register_step_post_hook(after_step))

    def call_before_step(self, look: Look) -> None:
        """Call a function once, when gradients are next taken: that is now where a running step has none to come."""
        if self._state is _State.TAKEN:
            look()
        else:
            self._waiting = look

    def close(self) -> None:
        """Remove every hook, and forget who waits."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._waiting, self._state = [], None, _State.IDLE
        self._hooked.clear()

    def _hook_begin(self, optimizer: Any) -> None:
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        """Note that a step is over; whoever still waits has missed what it took."""
        self._state, self._waiting = _State.IDLE, None
        self._ended()
