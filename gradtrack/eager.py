"""Steps of a compiled model that run eagerly, because an analyzer has to see inside."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


class EagerSteps:
    """Lets compiled code run eagerly for single steps: what was compiled stays, and nothing is compiled again.

    A compiled graph does not call hooks that were placed after it was made.
    """

    def __init__(self) -> None:
        self._stance: Any = None
        self.active = False
        """Whether steps run eagerly now."""

    def begin(self) -> None:
        """Run eagerly from now on."""
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")
            self.active = True

    def backward(self) -> AbstractContextManager[Any]:
        """Return the context for a backward pass: one that is captured looks at no stance that came after its begin.

        Captured with the hooks of an analyzer, it would be captured once more without them.
        """
        capturing = sys.modules.get("torch._dynamo.compiled_autograd")
        if self._stance is None or capturing is None or not capturing.compiled_autograd_enabled:
            return nullcontext()
        found: AbstractContextManager[Any] = capturing._disable()
        return found

    def end(self) -> None:
        """Run as before; a second call does nothing."""
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
            self.active = False


def is_compiled(model: nn.Module) -> bool:
    """Say whether a model or a part of it was compiled."""
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
