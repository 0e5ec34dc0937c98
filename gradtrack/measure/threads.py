"""Computing in the calling thread alone, for looks that consist of many small operations."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

_LIBRARIES: Final = ("libtorch_cpu.so", "libtorch_cpu.dylib")
_SMALL: Final = 1 << 20


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
    before, of_products = library.omp_get_max_threads(), library.MKL_Set_Num_Threads_Local(1)
    library.omp_set_num_threads(1)
    try:
        yield
    finally:
        library.omp_set_num_threads(before)
        library.MKL_Set_Num_Threads_Local(of_products)


def threads_for(num_elements: int) -> AbstractContextManager[None]:
    """Use one thread where the largest tensor has so few elements that more would not pay."""
    return one_thread() if num_elements <= _SMALL else nullcontext()


@cache
def _library() -> Any:
    """Return torch's library where it has the functions for this, which hold for the calling thread only."""
    for name in _LIBRARIES:
        path = Path(torch.__file__).parent / "lib" / name
        try:
            library = ctypes.CDLL(str(path))
            library.omp_get_max_threads, library.omp_set_num_threads, library.MKL_Set_Num_Threads_Local  # noqa: B018
        except (OSError, AttributeError):
            continue
        return library
    return None
