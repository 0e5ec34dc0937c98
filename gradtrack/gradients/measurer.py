"""The measurer: measures and scales gradients with the native engine or with torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.errors import MissingExtraError
from gradtrack.gradients import torch_cpu, torch_device
from gradtrack.gradients.moments import MAX, MIN, SMALLEST_FACTOR, SQUARES, WIDTH, Moments, Rows, merge

EngineName = Literal["auto", "torch", "native"]


class Batch:
    """The tensors of one step, sorted by the engine that covers them, with the native engine's plan for its own."""

    __slots__ = ("native", "others", "plan", "tensors")

    def __init__(
        self, tensors: Sequence[Tensor], native: Sequence[int], others: Sequence[int], plan: Any = None
    ) -> None:
        self.tensors, self.native, self.others, self.plan = tensors, native, others, plan

    @property
    def other_tensors(self) -> Sequence[Tensor]:
        """Return the tensors that torch measures."""
        return [self.tensors[index] for index in self.others] if self.native else self.tensors


class Measurer:
    """Measures gradients in one pass: those that the native engine covers with it, the others with torch."""

    def __init__(self, engine: EngineName = "auto") -> None:
        self._torch = TorchEngine()
        self.use(engine)

    def use(self, engine: EngineName) -> None:
        """Measure with another engine from now on."""
        self.native: Any = None if engine == "torch" else _native(required=engine == "native")
        """The native engine, whose plans may be used; None without it."""
        self.engine = engine

    def prepare(self, tensors: Sequence[Tensor], plan: Any = None) -> Batch:
        """Sort tensors by engine once, for the several calls of a step; `plan` is that of an earlier batch."""
        everything = range(len(tensors))
        if self.native is None:
            return Batch(tensors, (), everything)
        if plan is not None and plan.take(tensors):
            return Batch(tensors, everything, (), plan)
        covered = list(map(self.native.covers, tensors))
        native = [index for index, fits in enumerate(covered) if fits]
        others = [index for index, fits in enumerate(covered) if not fits]
        planned = self.native.plan([tensors[index] for index in native]) if native or not others else None
        return Batch(tensors, native, others, planned)

    def measure(self, tensors: Sequence[Tensor] | Batch, group_of: NDArray[np.int64], num_groups: int) -> Moments:
        """Return the sums of the gradients; measured again, rescaled, where squares leave the float64 range."""
        batch = tensors if isinstance(tensors, Batch) else self.prepare(tensors)
        moments = self._once(batch, group_of, num_groups, 0)
        if moments.out_of_range():
            low, high = moments.total[MIN], moments.total[MAX]
            exponent = math.frexp(max(abs(low), abs(high)))[1]
            moments = self._once(batch, group_of, num_groups, exponent)
        return moments

    def scale(self, tensors: Sequence[Tensor] | Batch, coefficient: float) -> None:
        """Multiply every gradient in place."""
        batch = tensors if isinstance(tensors, Batch) else self.prepare(tensors)
        if 0 < coefficient < SMALLEST_FACTOR:
            self.scale(batch, SMALLEST_FACTOR)
            coefficient /= SMALLEST_FACTOR
        if batch.native:
            batch.plan.scale(coefficient)
        if batch.others:
            self._torch.scale(batch.other_tensors, coefficient)

    def _once(self, batch: Batch, group_of: NDArray[np.int64], num_groups: int, exponent: int) -> Moments:
        if batch.plan is None:
            return Moments(*self._torch.measure(batch.tensors, group_of, num_groups, exponent=exponent), exponent)
        if not batch.others:
            found: Moments = batch.plan.measure(group_of, num_groups, exponent=exponent)
            return found
        rows = np.empty((len(batch.tensors), WIDTH))
        rows[batch.native] = batch.plan.measure(group_of[batch.native], num_groups, exponent=exponent).rows
        others = group_of[batch.others]
        rows[batch.others] = self._torch.measure(batch.other_tensors, others, num_groups, exponent=exponent)[0]
        return Moments(rows, *merge(rows, group_of, num_groups), exponent)


def _native(*, required: bool) -> object:
    try:
        from gradtrack.gradients.native.engine import NativeEngine
    except ImportError as fault:
        if required:
            raise MissingExtraError("engine 'native'", "numba", "native") from fault
        return None
    return NativeEngine()


class TorchEngine:
    """The torch engine: measures CPU tensors in pieces that stay in the cache, and other devices with one read."""

    name = "torch"

    def measure(
        self, grads: Sequence[Tensor], group_of: NDArray[np.int64], num_groups: int, *, exponent: int = 0
    ) -> tuple[Rows, Rows, list[float]]:
        """Return the rows of the tensors, of the groups and of everything."""
        rows = np.zeros((len(grads), 8))
        here = [index for index, grad in enumerate(grads) if grad.is_cpu]
        rows[here] = torch_cpu.measure([grads[index] for index in here], exponent)
        for device in dict.fromkeys(grad.device for grad in grads if not grad.is_cpu):
            there = [index for index, grad in enumerate(grads) if grad.device == device]
            rows[there] = self._read([grads[index] for index in there], exponent)
        return rows, *merge(rows, group_of, num_groups)

    def scale(self, grads: Sequence[Tensor], coefficient: float | Tensor) -> None:
        """Multiply every tensor in place."""
        if grads:
            torch._foreach_mul_(list(grads), coefficient)

    def _read(self, grads: Sequence[Tensor], exponent: int) -> Rows:
        """Measure tensors of one device, and those with non-finite elements a second time."""
        if exponent:
            grads = [grad * 2.0 ** (-exponent // 2) * 2.0 ** (-exponent - -exponent // 2) for grad in grads]
        rows: Rows = torch_device.measure(grads, exact=False).cpu().double().numpy()
        bad = [int(index) for index in np.flatnonzero(~np.isfinite(rows[:, : SQUARES + 1]).all(axis=1))]
        if bad:
            rows[bad] = torch_device.measure([grads[index] for index in bad], exact=True).cpu().double().numpy()
        return rows
