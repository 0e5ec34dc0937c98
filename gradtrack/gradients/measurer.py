"""The measurer: measures and scales gradients with the native engine, with Triton or with torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.errors import MissingExtraError
from gradtrack.gradients import torch_cpu
from gradtrack.gradients.moments import MAX, MIN, SMALLEST_FACTOR, WIDTH, Moments, Rows, merge
from gradtrack.gradients.torch_device import Plans, TorchPlan, halves_of
from gradtrack.support.interrupts import pass_on

EngineName = Literal["auto", "torch", "native", "triton"]
_HALVES: Final = frozenset({torch.float16, torch.bfloat16})
_logger = logging.getLogger("gradtrack")


@dataclass(slots=True, eq=False)
class Batch:
    """The tensors of one step, sorted by the engine that covers them, with the native engine's plan for its own."""

    tensors: Sequence[Tensor]
    native: Sequence[int]
    others: Sequence[int]
    plan: Any = None

    @property
    def other_tensors(self) -> Sequence[Tensor]:
        """Return the tensors that torch measures."""
        return [self.tensors[index] for index in self.others] if self.native else self.tensors


class Measurer:
    """Measures gradients in one pass: those that a compiled engine covers with it, the others with torch.

    The native engine is for the CPU, Triton for accelerators.
    """

    def __init__(self, engine: EngineName = "auto") -> None:
        self.use(engine)

    def use(self, engine: EngineName) -> None:
        """Measure with another engine from now on."""
        self.native: Any = _load("native", required=engine == "native") if engine in ("auto", "native") else None
        """The native engine, whose plans may be used; None without it."""
        self.accelerators = Accelerators(engine)
        self._torch = TorchEngine(self.accelerators)
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


class Accelerators:
    """Finds the engine for gradients that are not for the CPU's loops: Triton where it works, or where it is set."""

    def __init__(self, engine: EngineName) -> None:
        self._engine = engine
        self._triton: Any = _load("triton", required=True) if engine == "triton" else None
        self._works: dict[torch.device, bool] = {}
        self.torch_plans = Plans(partial(TorchPlan, memory={}))

    def plan(self, grads: Sequence[Tensor]) -> Any:
        """Return the plan for gradients of one device: Triton's where it covers all of them, else that of torch."""
        triton, covered = self.triton_for(grads)
        return triton.plans.of(grads) if len(covered) == len(grads) else self.torch_plans.of(grads)

    def triton_for(self, grads: Sequence[Tensor]) -> tuple[Any, list[int]]:
        """Return the Triton engine and the indices of the gradients that it measures, all on one device."""
        if self._engine not in ("auto", "triton") or (self._engine == "auto" and grads[0].is_cpu):
            return None, []
        if self._triton is None:
            self._triton = _load("triton", required=False) or False
        if not self._triton:
            return None, []
        covered = [index for index, grad in enumerate(grads) if self._triton.covers(grad)]
        return (self._triton, covered) if covered and self._can_launch(grads[0].device) else (None, [])

    def _can_launch(self, device: torch.device) -> bool:
        """Say whether Triton's kernels run on a device; `auto` tries it once, since they need a compiler there."""
        if self._engine == "auto" and device not in self._works:
            try:
                self._works[device] = self._triton.works_on(device)
            except Exception as fault:
                pass_on(fault)
                _logger.warning("engine auto: Triton cannot be used on %s, so torch measures there: %s", device, fault)
                self._works[device] = False
        return self._works.get(device, True)


def _load(name: Literal["native", "triton"], *, required: bool) -> Any:
    """Make a compiled engine; None without its compiler, unless it is required."""
    try:
        if name == "native":
            from gradtrack.gradients.native.engine import NativeEngine

            return NativeEngine()
        from gradtrack.gradients.triton.engine import TritonEngine

        return TritonEngine()
    except ImportError as fault:
        if required:
            raise MissingExtraError(f"engine {name!r}", "numba" if name == "native" else name, name) from fault
        return None


class TorchEngine:
    """The torch engine: measures CPU tensors in pieces that stay in the cache, and other devices with one read.

    It leaves to Triton what that engine measures.
    """

    def __init__(self, accelerators: Accelerators) -> None:
        self._accelerators = accelerators

    def measure(
        self, grads: Sequence[Tensor], group_of: NDArray[np.int64], num_groups: int, *, exponent: int = 0
    ) -> tuple[Rows, Rows, list[float]]:
        """Return the rows of the tensors, of the groups and of everything."""
        rows = np.zeros((len(grads), 8))
        for device in dict.fromkeys(grad.device for grad in grads):
            here = np.array([index for index, grad in enumerate(grads) if grad.device == device])
            there = [grads[index] for index in here]
            triton, covered = self._accelerators.triton_for(there)
            if covered:
                rows[here[covered]] = triton.measure([there[index] for index in covered], exponent)
            if len(covered) < len(there):
                rest = np.setdiff1d(np.arange(len(there)), covered)
                remaining = [there[index] for index in rest]
                if device.type == "cpu":
                    rows[here[rest]] = torch_cpu.measure(remaining, exponent)
                else:
                    rows[here[rest]] = self._accelerators.torch_plans.of(remaining).rows(remaining, halves_of(exponent))
        return rows, *merge(rows, group_of, num_groups)

    def scale(self, grads: Sequence[Tensor], coefficient: float | Tensor) -> None:
        """Multiply every tensor in place."""
        together = list[Tensor]()
        for grad in grads:
            if grad.is_cpu and grad.dtype in _HALVES:  # for which torch's loop over tensors rounds the factor as well
                grad.mul_(coefficient)
            else:
                together.append(grad)
        if together:
            torch._foreach_mul_(together, coefficient)
