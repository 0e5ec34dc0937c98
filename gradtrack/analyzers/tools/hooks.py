"""Forward hooks of one module that copies of it do not share, that never raise, and that compiled models call."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from gradtrack.support.interrupts import Changes, pass_on

_here = threading.local()


@contextmanager
def unheard() -> Iterator[None]:
    """Hide the forward passes of this thread from all hooks, while an analyzer runs parts of the model again."""
    with Changes() as changes:
        changes.note(partial(setattr, _here, "unheard", is_unheard()))
        _here.unheard = True
        yield


def is_unheard() -> bool:
    """Say whether forward passes of this thread are an analyzer's own."""
    found: bool = getattr(_here, "unheard", False)
    return found


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


class EagerSteps:
    """Runs compiled models eagerly for single steps, without discarding or repeating a compilation.

    A compiled graph does not call hooks that were registered after its compilation.
    """

    def __init__(self) -> None:
        self._stance: Any = None
        self.active = False
        """Whether steps run eagerly now."""

    def begin(self) -> None:
        """Run compiled code eagerly from now on."""
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")
            self.active = True

    def backward(self) -> AbstractContextManager[Any]:
        """Return the context for a backward pass, which switches off compiled autograd while steps run eagerly.

        Compiled autograd ignores a stance that is set after it has begun; a graph with the hooks of an analyzer would
        have to be captured once more without them.
        """
        capturing = sys.modules.get("torch._dynamo.compiled_autograd")
        if self._stance is None or capturing is None or not capturing.compiled_autograd_enabled:
            return nullcontext()
        found: AbstractContextManager[Any] = capturing._disable()
        return found

    def end(self) -> None:
        """Run compiled code as compiled again; a second call does nothing."""
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
            self.active = False
