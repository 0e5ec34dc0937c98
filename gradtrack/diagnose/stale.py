"""Gradients that an optimizer step has already used and that the next backward pass adds to."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class StaleWatch:
    """Hooks on the parameters for the backward passes of one step, that see what a gradient is added to.

    Adding to a gradient is accumulation, and legal, unless the parameter has changed since the gradient was there. A
    parameter is innocent once a pass starts it afresh: the generator of a GAN and the actor of DDPG go back through
    another model, whose own old gradients are cleared only before its own pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._stale: dict[str, None] = {}
        self._fresh: set[str] = set()
        self._handles = [
            param.register_hook(self._hook(name, param))  # type: ignore[no-untyped-call]
            for name, param in model.named_parameters()
            if param.requires_grad
        ]

    @property
    def found(self) -> list[str]:
        """Name the parameters whose old gradients were added to and never cleared."""
        return list(self._stale)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str, param: nn.Parameter) -> Callable[[Tensor], None]:
        version = param._version

        def hook(_: Tensor) -> None:
            if name in self._fresh:
                return
            if _is_empty(param.grad):
                self._fresh.add(name)
                self._stale.pop(name, None)
            elif param._version != version:
                self._stale[name] = None

        return hook


def _is_empty(grad: Tensor | None) -> bool:
    return grad is None or not bool((grad.coalesce().values() if grad.is_sparse else grad).any())
