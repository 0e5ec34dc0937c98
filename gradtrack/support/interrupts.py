"""Interrupts: exceptions that a signal handler raised, and changes that are undone in spite of them."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self


def pass_on(fault: BaseException) -> None:
    """Raise a fault again if a signal handler raised it; call this first in every broad `except` block.

    The interpreter calls a handler at any line of the main thread, so its exception looks like a fault of that line: a
    `Terminated` or a `TimeoutError` would be taken for a broken tracker, and the training would go on. A library that
    it strikes may have raised an exception of its own instead: then that of the handler is raised.
    """
    struck = _struck(fault, set())
    if struck is not None:
        raise struck


def start(thread: threading.Thread) -> None:
    """Start a thread; `threading` itself raises KeyError where a handler raises in the middle of that."""
    try:
        thread.start()
    except KeyError as fault:
        pass_on(fault)
        raise


def _struck(fault: BaseException, seen: set[int]) -> BaseException | None:
    """Return what a handler raised, if that is this fault, or what code on the way has turned into this fault."""
    seen.add(id(fault))
    above: TracebackType | None = fault.__traceback__
    frames: set[FrameType] = set()
    while above is not None:
        if above.tb_next is not None and _was_given(above.tb_next.tb_frame, above.tb_frame):
            return fault
        frames.add(above.tb_frame)
        above = above.tb_next
    for inner in (fault.__cause__, fault.__context__):
        if inner is None or id(inner) in seen or not _is_within(inner, frames):
            continue
        if not isinstance(inner, Exception):  # an interrupt from the keyboard that a library took for a fault
            return inner
        found = _struck(inner, seen)
        if found is not None:
            return found
    return None


def _is_within(inner: BaseException, frames: set[FrameType]) -> bool:
    """Whether an exception was caught in one of these frames or below; those that a caller handles were not."""
    frame = None if inner.__traceback__ is None else inner.__traceback__.tb_frame
    while frame is not None and frame not in frames:
        frame = frame.f_back
    return frame is not None


def _was_given(handler: FrameType, struck: FrameType) -> bool:
    """Whether a function was called with the frame that it interrupted, as only signal handlers are."""
    code, variables = handler.f_code, handler.f_locals
    num_given = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    values = [variables[name] for name in code.co_varnames[:num_given] if name in variables]
    return any(value is struck or (type(value) is tuple and any(one is struck for one in value)) for value in values)


class Changes:
    """The hooks and other changes that one owner makes to things of the user's.

    A signal handler may raise at any moment, so each change is known before it is made, and undone as often as it
    takes. The owner has its `Changes` before it makes the first.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.undo()
        finally:
            self.undo()

    def note(self, undo: Callable[[], object]) -> None:
        """Note, before a change is made, what undoes it; that may be called twice, and without the change."""
        self._undo.append(undo)

    def hook(self, register: Callable[..., Any], hook: Callable[..., Any], **options: Any) -> None:
        """Register a hook by a method of a module, a tensor or an optimizer, or by a function of torch."""
        handles: list[Any] = []
        self.note(partial(_remove, register, hook, handles))
        handles.append(register(hook, **options))

    @contextmanager
    def or_none(self) -> Iterator[None]:
        """Undo every change where the block, as the rest of a constructor, ends with an exception."""
        try:
            yield
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Undo every change, the last one first; a second call does nothing."""
        try:
            self._undo_all()
        except BaseException:  # an interrupt in the middle
            self._undo_all()
            raise

    def _undo_all(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def _remove(register: Callable[..., Any], hook: Callable[..., Any], handles: list[Any]) -> None:
    """Remove a hook by its handle, or by itself where an interrupt in torch has kept the handle from being known."""
    if handles:
        handles[0].remove()
        return
    owner = getattr(register, "__self__", None)
    owner = sys.modules[register.__module__] if owner is None else owner
    found = [getattr(owner, name) for name in dir(owner) if "_hooks" in name]
    tables = [table for table in found if isinstance(table, dict)]
    for key in [key for table in tables for key, there in table.items() if there is hook]:
        for table in tables:  # those of options have the same keys
            table.pop(key, None)
