"""Interrupts: tells exceptions that a signal handler raised from faults of the line that it struck."""

from __future__ import annotations

import inspect
import threading
from types import FrameType, TracebackType


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
