"""Forward hooks of one module that copies of it do not share, and that never raise."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gradtrack.support.interrupts import pass_on

_here = threading.local()


@contextmanager
def unheard() -> Iterator[None]:
    """Hide the forward passes of this thread from all hooks, while an analyzer runs parts of the model again."""
    before, _here.unheard = is_unheard(), True
    try:
        yield
    finally:
        _here.unheard = before


def is_unheard() -> bool:
    """Say whether forward passes of this thread are an analyzer's own."""
    found: bool = getattr(_here, "unheard", False)
    return found


def remove_all(handles: list[Any]) -> None:
    """Remove hooks by their handles, and forget these: a second call does nothing."""
    for handle in handles:
        handle.remove()
    handles.clear()


class Faults:
    """The first exception of several hooks, kept out of the user's forward and backward passes.

    After it the hooks do nothing; `check` raises it in the code that reads what the hooks saw.
    """

    def __init__(self) -> None:
        self._first: Exception | None = None

    def guarded(self, call: Callable[..., None]) -> Callable[..., None]:
        """Return a function that never raises."""

        def guard(*args: Any, **kwargs: Any) -> None:
            if self._first is None:
                try:
                    call(*args, **kwargs)
                except Exception as fault:
                    pass_on(fault)
                    self._first = fault

        return guard

    def check(self) -> None:
        """Raise the fault, if there was one."""
        if self._first is not None:
            raise self._first


class Unshared:
    """A hook that a copy or a pickle of its module loses."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Nothing, ())


class Nothing:
    """The hook that does nothing, which a copied or pickled hook becomes."""

    def __call__(self, *_: object) -> None:
        """Do nothing."""


class ModuleHook(Unshared):
    """A forward hook that calls a function for one module, and not for a shallow copy, which shares its hooks."""

    def __init__(self, module: nn.Module, call: Callable[..., None]) -> None:
        self._module, self._call = weakref.ref(module), call

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        """Pass a call of the module to the function, unless an analyzer made the call."""
        if module is self._module() and not is_unheard():
            self._call(module, *rest)
