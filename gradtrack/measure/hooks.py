"""Hooks that belong to one module and to nothing that is made from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class Unshared:
    """A hook that a copy or a pickle of its module loses."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Nothing, ())


class Nothing:
    """What a copied or pickled hook becomes."""

    def __call__(self, *_: object) -> None:
        """Do nothing."""


class ModuleHook(Unshared):
    """A forward hook that calls a function for one module, and not for a shallow copy, which shares its hooks."""

    def __init__(self, module: nn.Module, call: Callable[..., None]) -> None:
        self._module, self._call = weakref.ref(module), call

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        """Pass a call of the module on."""
        if module is self._module():
            self._call(module, *rest)
