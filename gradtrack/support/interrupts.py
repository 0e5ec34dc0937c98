"""Facts of the process: exceptions that a signal handler raised, and the rank."""

from __future__ import annotations

import inspect
import os
from types import FrameType, TracebackType
from typing import Final

import torch


def pass_on(fault: BaseException) -> None:
    """Raise a fault again if a signal handler raised it; call this first in every broad `except` block.

    The interpreter calls a handler at any line of the main thread, so its exception looks like a fault of that line: a
    `Terminated` or a `TimeoutError` would be taken for a broken tracker, and the training would go on.
    """
    above: TracebackType | None = fault.__traceback__
    while above is not None and above.tb_next is not None:
        if _was_given(above.tb_next.tb_frame, above.tb_frame):
            raise fault
        above = above.tb_next


def _was_given(handler: FrameType, struck: FrameType) -> bool:
    """Whether a function was called with the frame that it interrupted, as only signal handlers are."""
    code, variables = handler.f_code, handler.f_locals
    num_given = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    values = [variables[name] for name in code.co_varnames[:num_given] if name in variables]
    return any(value is struck or (type(value) is tuple and any(one is struck for one in value)) for value in values)


_VARIABLES: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def process_rank() -> int:
    """Return this process's rank, 0 where there is only one: the initialised group's, else the launcher's."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    for name in _VARIABLES:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return 0
