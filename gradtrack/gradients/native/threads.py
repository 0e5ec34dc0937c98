"""Threads: the OpenMP team that torch computes with, and blocks in which torch uses one thread."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

_LIBRARIES: Final = ("libtorch_cpu.so", "libtorch_cpu.dylib")
_SMALL: Final = 1 << 20
_FORKED_NOT_EXECUTED: Final = 0x40


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use no other thread for what this thread does in a `with` block, where that can be had.

    Small operations gain nothing from more threads, and between them threads wait for each other: on a machine that
    others use too, a hundred times as long as the work takes. `torch.set_num_threads` would reach into other threads
    and outlast the block, and with it change the sums of a training; this does neither.
    """
    library = _library()
    if library is None or torch.get_num_threads() == 1:  # asking is what makes torch choose a number in this thread
        yield
        return
    before, of_products = library.omp_get_max_threads(), 0

    def put_back() -> None:
        library.omp_set_num_threads(before)
        library.MKL_Set_Num_Threads_Local(of_products)

    try:
        of_products = library.MKL_Set_Num_Threads_Local(1)
        library.omp_set_num_threads(1)
        yield
    finally:
        try:
            put_back()
        except BaseException:  # an interrupt in the middle
            put_back()
            raise


def threads_for(num_elements: int) -> AbstractContextManager[None]:
    """Use one thread where the largest tensor has so few elements that more would not pay."""
    return one_thread() if num_elements <= _SMALL else nullcontext()


def team() -> tuple[int, int] | None:
    """Return the addresses of what runs work on torch's own threads and of what numbers them there, if they exist.

    These are GOMP_parallel and omp_get_thread_num. Beside a training the threads are awake, so that calling them
    costs a microsecond or two. A forked process has none: they stayed behind, and OpenMP would wait for them.
    """
    return _team() if _has_team else None


@cache
def _team() -> tuple[int, int] | None:
    library = _find("GOMP_parallel", "omp_get_thread_num")
    if library is None:
        return None
    run, seat = (ctypes.cast(found, ctypes.c_void_p) for found in (library.GOMP_parallel, library.omp_get_thread_num))
    return (run.value, seat.value) if run.value and seat.value else None


@cache
def _library() -> Any:
    """Return torch's library where it has the functions for this, which hold for the calling thread only."""
    return _find("omp_get_max_threads", "omp_set_num_threads", "MKL_Set_Num_Threads_Local")


def _find(*functions: str) -> Any:
    """Return torch's library, or None where it, or what it was linked with, lacks one of these functions."""
    for name in _LIBRARIES:
        path = Path(torch.__file__).parent / "lib" / name
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        if all(hasattr(library, function) for function in functions):
            return library
    return None


def _was_forked() -> bool:
    """Say whether this process is a copy of another that still runs its program: torch's threads are not in it."""
    try:
        flags = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[6])
    except (OSError, ValueError, IndexError):  # another system than Linux
        return False
    return bool(flags & _FORKED_NOT_EXECUTED)


def _leave_behind() -> None:
    global _has_team
    _has_team = False


_has_team = not _was_forked()  # the copy may be the first to import this
if hasattr(os, "register_at_fork"):  # which Windows has not
    os.register_at_fork(after_in_child=_leave_behind)
