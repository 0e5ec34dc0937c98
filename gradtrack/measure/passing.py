"""Gradients that an optimizer uses up inside the backward pass, measured as they pass."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.measure.gradients import Gradients
from gradtrack.measure.measurer import Measurer
from gradtrack.measure.moments import WIDTH, Moments, Rows, merge
from gradtrack.measure.table import ParameterTable

_POWERS = np.array([1, 2, 1, 1, 0, 0, 0, 0])
"""By which power of a scale each number of a row grows."""


class PassedGradients(Gradients):
    """What was measured of gradients that are gone by now: they can be reported, and no longer be changed."""

    def __init__(self, gradients: Gradients, rows: Rows) -> None:
        super().__init__([], gradients.layout, {})
        self._rows = rows

    def measure(self, measurer: Measurer) -> Moments:
        """Return the sums of the gradients as they passed."""
        layout = self.layout
        return Moments(self._rows, *merge(self._rows, layout.group_of, len(layout.group_names)))

    def count(self) -> Rows:
        """Count nothing, since nothing is left to be counted."""
        return np.zeros((len(self.layout.group_names), 1))


class Passing:
    """Hooks that come before an optimizer's own and measure every gradient of a backward pass."""

    def __init__(self, params: Sequence[nn.Parameter], measurer: Measurer) -> None:
        itself, self._rows = weakref.ref(self), dict[int, NDArray[np.float64]]()
        self._measurer, self._alone = measurer, np.zeros(1, dtype=np.int64)

        def passes(param: Tensor) -> None:
            owner = itself()
            if owner is not None and param.grad is not None:
                owner._measure(param)

        self._handles: list[Any] = []
        for param in params:
            handle: Any = param.register_post_accumulate_grad_hook(passes)  # type: ignore[no-untyped-call]
            _put_first(param._post_accumulate_grad_hooks, handle.id)
            self._handles.append(handle)

    def _measure(self, param: Tensor) -> None:
        moments = self._measurer.measure([param.grad], self._alone, 1)  # type: ignore[list-item]
        self._rows[id(param)] = np.ldexp(moments.rows[0], moments.exponent * _POWERS)

    def take(self, table: ParameterTable) -> PassedGradients:
        """Return what has passed since the last time."""
        rows, self._rows = self._rows, {}
        present = [index for index, param in enumerate(table.params) if id(param) in rows]
        found = np.array([rows[id(table.params[index])] for index in present]).reshape(-1, WIDTH)
        return PassedGradients(table.passed(present), found)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _put_first(hooks: Any, number: int) -> None:
    """Put a hook before all others; the engine goes by the order in which they came, so they come anew."""
    items = sorted(hooks.items(), key=lambda item: item[0] != number)
    hooks.clear()
    hooks.update(items)


def step_in_backward(params: Sequence[nn.Parameter]) -> bool:
    """Say whether optimizers are known to step inside the backward pass."""
    return any(hasattr(param, "_in_backward_optimizers") for param in params)


def may_step_in_backward(params: Sequence[nn.Parameter]) -> bool:
    """Say whether somebody has hooked the accumulation of gradients, of which then none is left."""
    return all(param.grad is None for param in params) and any(param._post_accumulate_grad_hooks for param in params)
