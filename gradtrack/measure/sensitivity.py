"""How much a model's loss depends on its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class InputSensitivity:
    """The norm of the gradient of the loss on the first floating input of each batch."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._found: list[float] = []

    def inputs(self, input_fn: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a source of batches so that the first floating tensor of each is followed."""

        def followed() -> Any:
            batch = input_fn()
            values = list(batch) if isinstance(batch, tuple) else [batch]
            for index, value in enumerate(values):
                if isinstance(value, Tensor) and value.is_floating_point():
                    self._input = values[index] = value.detach().requires_grad_()
                    return tuple(values) if isinstance(batch, tuple) else values[0]
            return batch

        return followed

    def losses(self, loss_fn: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """Wrap a loss so that its gradient on the followed input is measured."""

        def measured(output: Any) -> Tensor:
            loss = loss_fn(output)
            if self._input is not None and loss.requires_grad:
                (slope,) = torch.autograd.grad(loss, self._input, retain_graph=True, allow_unused=True)
                if slope is not None:
                    self._found.append(float(slope.double().norm()))
            return loss

        return measured

    def mean(self) -> float | None:
        """Return the mean norm, or None where no input was floating."""
        return sum(self._found) / len(self._found) if self._found else None
