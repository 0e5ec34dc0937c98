"""Gradients inside the backward pass: measured by hooks, just before an optimizer uses them and frees them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from gradtrack.gradients.collected import Gradients, SharedGradients
from gradtrack.gradients.distributed.shards import is_distributed, local_gradient
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.moments import WIDTH, Moments, Rows, count_elements, empty_row, merge
from gradtrack.gradients.parameters import ParameterTable
from gradtrack.support.interrupts import Changes

_POWERS = np.array([1, 2, 1, 1, 0, 0, 0, 0])
"""The power of a scale by which each number of a row grows."""


class PassedGradients(Gradients):
    """The sums of gradients that the optimizers have used already: they are reported, and cannot be changed."""

    passed = True

    def __init__(self, layout: Layout, rows: Rows) -> None:
        super().__init__([], layout, {})
        self._rows = rows

    def prepare_as_planned(self, measurer: Measurer) -> bool:
        """Return True, since there are no tensors to prepare."""
        return True

    def measure(self, measurer: Measurer) -> Moments:
        """Return the sums that the hooks have measured."""
        layout = self.layout
        return Moments(self._rows, *merge(self._rows, layout.group_of, len(layout.group_names)))

    def count(self) -> Rows:
        """Return counts of zero, since there are no tensors to count."""
        return np.zeros((len(self.layout.group_names), 1))


class PassedShards(SharedGradients):
    """The sums of this rank's parts of gradients that the optimizers have used already, merged with the other ranks'.

    A rank sends as many numbers as for gradients that still exist, with nothing to clip and nothing to count.
    """

    __slots__ = ("_counts", "_rows")
    passed = True

    def __init__(
        self, table: ParameterTable, rows: Mapping[int, NDArray[np.float64]], counts: Mapping[int, int]
    ) -> None:
        assert table.ranks is not None
        super().__init__(table.params, table.ranks, table.lay_out)
        self.tensors = []
        self.has_gradient = np.array([id(param) in rows for param in table.params])
        self._rows = np.array([rows.get(id(param), empty_row()) for param in table.params])
        self._counts = np.array([counts.get(id(param), 0) for param in table.params])

    def _measure_local(self, measurer: Measurer) -> tuple[Moments, NDArray[np.int64]]:
        rows, layout = self._rows[self.positions], self.layout
        return Moments(rows, *merge(rows, layout.group_of, len(layout.group_names))), self._counts[self.positions]

    def _tally(self) -> Rows:
        return count_elements([], [], len(self.layout.group_names))


class GradientsInBackward:
    """Hooks that measure every gradient inside the backward pass, before an optimizer's own hook uses it."""

    def __init__(self, params: Sequence[nn.Parameter], measurer: Measurer) -> None:
        itself, self._rows = weakref.ref(self), dict[int, NDArray[np.float64]]()
        self._counts: dict[int, int] = {}
        self._measurer, self._alone = measurer, np.zeros(1, dtype=np.int64)

        def on_gradient(param: nn.Parameter) -> None:
            owner = itself()
            if owner is not None and param.grad is not None:
                owner._measure(param)

        self._changes = Changes()
        with self._changes.or_none():
            for param in params:
                self._changes.hook(param.register_post_accumulate_grad_hook, on_gradient)
                _put_first(param._post_accumulate_grad_hooks, on_gradient)

    def _measure(self, param: nn.Parameter) -> None:
        grad: Any = local_gradient(param) if is_distributed(param) else param.grad
        moments = self._measurer.measure([grad], self._alone, 1)
        self._rows[id(param)] = np.ldexp(moments.rows[0], moments.exponent * _POWERS)
        self._counts[id(param)] = grad.numel()

    def collect(self, table: ParameterTable) -> Gradients:
        """Return the gradients that were measured since the last call."""
        rows, self._rows = self._rows, {}
        if table.ranks is not None:
            return PassedShards(table, rows, self._counts)
        present = [index for index, param in enumerate(table.params) if id(param) in rows]
        found = np.array([rows[id(table.params[index])] for index in present]).reshape(-1, WIDTH)
        return PassedGradients(table.lay_out(present), found)

    def close(self) -> None:
        """Remove the hooks."""
        self._changes.undo()


def _put_first(hooks: Any, hook: object) -> None:
    """Move a hook before all others, by inserting all of them anew: autograd calls them in order of insertion."""
    items = sorted(hooks.items(), key=lambda item: item[1] is not hook)
    try:
        hooks.clear()
        hooks.update(items)
    except BaseException:  # an interrupt between the two must not lose those of the user
        hooks.update(items)
        raise


def step_in_backward(params: Sequence[nn.Parameter]) -> bool:
    """Say whether optimizers are known to step inside the backward pass."""
    return any(hasattr(param, "_in_backward_optimizers") for param in params)


def may_step_in_backward(params: Sequence[nn.Parameter]) -> bool:
    """Say whether hooks of the loop may step inside the backward pass, since they have left no gradient."""
    return all(param.grad is None for param in params) and any(param._post_accumulate_grad_hooks for param in params)
