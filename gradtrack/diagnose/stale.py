"""Gradients that an optimizer step has already used and that the next backward pass adds to."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class StaleWatch:
    """Hooks on the parameters for one backward pass, that see what a gradient is added to.

    Adding to a gradient is accumulation, and legal, unless the parameter has changed since the gradient was there.
    """

    def __init__(self, model: nn.Module) -> None:
        self.found: list[str] = []
        self._seen: set[str] = set()
        self._handles = [
            param.register_hook(self._hook(name, param))  # type: ignore[no-untyped-call]
            for name, param in model.named_parameters()
            if param.requires_grad
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str, param: nn.Parameter) -> Callable[[Tensor], None]:
        version = param._version

        def hook(_: Tensor) -> None:
            if name in self._seen:
                return
            self._seen.add(name)
            grad = param.grad
            if grad is None or param._version == version:
                return
            if bool((grad.coalesce().values() if grad.is_sparse else grad).any()):
                self.found.append(name)

        return hook
