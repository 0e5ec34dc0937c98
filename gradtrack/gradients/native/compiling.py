"""How loops are compiled: into those that call them, or at import, where the cache on disk may have them already.

That cache asks whether the file of a loop has changed, not whether this one has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

from numba import config, njit

if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set: expected a compiler. Unset it to use the native engine.")

Value: TypeAlias = Any
"""A number or an array whose type only the compiler knows."""
_Function = TypeVar("_Function", bound=Callable[..., Value])


def compiled(function: _Function) -> _Function:
    """Compile a function into those that call it."""
    return cast("_Function", njit(nogil=True)(function))


def compiled_freely(function: _Function) -> _Function:
    """Compile a function whose sums may be taken in any order, so that they run on vectors."""
    return cast("_Function", njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})(function))


def compiled_now(signature: str) -> Callable[[_Function], _Function]:
    """Compile a function at import, or load it from the cache on disk."""

    def compile_or_load(function: _Function) -> _Function:
        try:
            return cast("_Function", njit(signature, nogil=True, cache=True)(function))
        except Exception:  # no directory can be written, or what is in it is damaged
            return cast("_Function", njit(signature, nogil=True)(function))

    return compile_or_load
