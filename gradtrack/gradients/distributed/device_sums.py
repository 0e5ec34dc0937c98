"""The sums of ranks on their accelerators: added up and decided by there, and read once they are on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.gradients.collected import SharedGradients
from gradtrack.gradients.distributed.merge import NONFINITE, PRESENT, SUMMED, MergedSums, Spread
from gradtrack.gradients.moments import SQUARES
from gradtrack.gradients.torch_device import WITHOUT_FLOAT64, Orders, coefficient_on_device

_SQUARES: Final = SUMMED.index(SQUARES)


def fits_on_device(grads: SharedGradients) -> bool:
    """Say whether the sums of gradients can be added up on their device, in one float64 number each."""
    return not grads.ranks.is_wide and grads.tensors[0].device.type not in WITHOUT_FLOAT64


class _Constants(NamedTuple):
    """What follows from the gradients that this rank has, on the device: it is sent there where that has changed."""

    key: object
    beside: Tensor
    """The columns of the sum that are not measured: presence, a place for the weights, the sizes of plain shards."""
    copies: Tensor
    is_single: Tensor
    """How often an element is there among the ranks, and which parameters are plain tensors beside DTensors."""
    replaced: Tensor
    """The squares of what replaces NaN and infinities of both signs in each gradient."""


@final
class SharedPlan:
    """The plan of a step for gradients that are spread over accelerators.

    `start` measures this rank's parts by the plan of their device, has the ranks add up the sums there, decides from
    these, so that all ranks decide alike, and changes the parts. The host waits for nothing.
    """

    def __init__(
        self,
        plan: Any,
        grads: SharedGradients,
        loss: Tensor | float | None,
        *,
        ends: bool,
        spread: bool,
        limits: bool,
    ) -> None:
        self._plan, self._ranks, self._loss = plan, grads.ranks, loss
        self._has_gradient, self._sizes = grads.has_gradient, grads.layout.sizes
        self._ends, self._spread, self._limits, self._num_sums = ends, ends and spread, limits, 0
        self.found_inf: Tensor

    def start(self, grads: Sequence[Tensor], orders: Orders, weights: Sequence[Tensor] = ()) -> Tensor:
        """Measure and protect gradients by operations on their device; return the numbers that `read` takes."""
        kinds = torch.distributed.ReduceOp
        with torch.no_grad():
            known = self._constants(grads, orders)
            rows, ends = self._plan.local_sums(grads, orders)
            own = Spread.on_device(rows.select(1, _SQUARES).sum(), _bad(rows).sum() > 0) if self._spread else None
            highs = []
            if self._ends:
                highs = [self._ranks.reduce(_together(ends, None if own is None else own[1]), kinds.MAX)]
            limited = [self._plan.foresee(orders)] if self._limits else []
            columns, loss = torch.cat([rows, known.beside, *limited], dim=1), self._loss_on(rows)
            sums = self._ranks.reduce(_together(columns, loss, None if own is None else own[0]), kinds.SUM)
            self._num_sums = sums.numel()
            bad, coefficient = _decide(sums.narrow(0, 0, columns.numel()).view(columns.shape), known, orders)
            self.found_inf = bad.float()
            self._plan.change(grads, orders, coefficient, self.found_inf)
            return torch.cat([sums, *highs])

    def read(self, values: NDArray[np.float64]) -> MergedSums:
        """Return the sums of all ranks from the numbers that `start` has returned, on the host now."""
        sums, ends = values[: self._num_sums], values[self._num_sums :] if self._ends else None
        return self._ranks.read(sums, ends, self._sizes, spread=self._spread, limited=self._limits)

    def _loss_on(self, rows: Tensor) -> Tensor:
        """Return the loss and a one, beside the rows; two zeros without a loss."""
        loss: Any = self._loss
        if loss is None:
            return rows.new_zeros(2)
        if isinstance(loss, Tensor):
            loss = loss.detach().reshape(1).to(rows, non_blocking=True)
        else:
            loss = rows.new_full((1,), loss)
        return torch.cat([loss, rows.new_ones(1)])

    def _constants(self, grads: Sequence[Tensor], orders: Orders) -> _Constants:
        """Return what is known of gradients beforehand, which for most steps is on the device already."""
        ranks, device, values = self._ranks, grads[0].device, orders.replacements
        sizes = [grad.numel() for grad in grads] if ranks.has_plain_shards else []
        places = [(0.0, 0.0) if values is None else values[grad.dtype] for grad in grads]
        key = device, self._has_gradient.tobytes(), sizes, values and (dict(values), [grad.dtype for grad in grads])
        found: _Constants | None = ranks.device_constants
        if found is None or found.key != key:
            beside = [self._has_gradient, np.zeros(len(grads)), *([np.array(sizes)] if sizes else [])]
            nan, infinity = np.square(np.array(places, np.float64)).T
            arrays = (
                np.stack(beside, axis=1).astype(np.float64),
                len(ranks.members) / ranks.shards,
                ranks.shards == 1,
                np.stack([nan, infinity, infinity], axis=1),
            )
            on_device = (torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)
            ranks.device_constants = found = _Constants(key, *on_device)
        return found


def _together(*parts: Tensor | None) -> Tensor:
    return torch.cat([part.flatten() for part in parts if part is not None])


def _bad(sums: Tensor) -> Tensor:
    """Return the columns with the numbers of NaN, +Inf and -Inf."""
    return sums.narrow(1, NONFINITE.start, NONFINITE.stop - NONFINITE.start)


def _decide(sums: Tensor, known: _Constants, orders: Orders) -> tuple[Tensor, Tensor | None]:
    """Return whether any element is not finite, and the factor to clip by, from the sums of all ranks."""
    bad = _bad(sums).sum() > 0
    if orders.limit is None or orders.clip_type != "norm":
        return bad, None
    present = sums.select(1, PRESENT).clamp(min=1.0)
    there = torch.where(known.is_single, present, known.copies)
    squares, replaces = (sums.select(1, _SQUARES) / there).sum(), orders.replacements is not None
    if replaces:
        squares = squares + ((_bad(sums) / there.unsqueeze(1)).ceil() * known.replaced).sum()
    return bad, coefficient_on_device(squares.sqrt(), orders.limit, orders.epsilon, None if replaces else bad)
