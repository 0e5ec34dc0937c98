"""The gradients of the micro-batches of a step, told apart while they accumulate."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gradtrack.measure.gradient_noise import GradientNoise
from gradtrack.measure.hooks import Faults
from gradtrack.measure.samples import weighed_sample


class MicroBatches:
    """Hooks that sample each parameter's gradient whenever a backward pass has added to it."""

    def __init__(self, model: nn.Module, most: int) -> None:
        itself, self._most = weakref.ref(self), most
        self._sums: dict[int, list[Tensor]] = {}

        def accumulated(param: Tensor) -> None:
            owner = itself()
            if owner is not None and type(param.grad) is Tensor and param.grad.layout is torch.strided:
                owner._sums.setdefault(id(param), []).append(weighed_sample(param.grad, owner._most))

        self._faults = Faults()
        guarded = self._faults.guarded(accumulated)
        self._handles: list[Any] = []
        for param in model.parameters():
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(guarded))  # type: ignore[no-untyped-call]

    def noise(self) -> GradientNoise | None:
        """Return what the gradients of the micro-batches come to; None where there was a single one."""
        self._faults.check()
        count = max(map(len, self._sums.values()), default=0)
        parts = [sums for sums in self._sums.values() if len(sums) == count]
        if count < 2:
            return None
        totals = [torch.cat([sums[index] for sums in parts]) for index in range(count)]
        return GradientNoise([totals[0], *(after - before for before, after in pairwise(totals))])

    def close(self) -> None:
        """Remove the hooks and forget the samples."""
        for handle in self._handles:
            handle.remove()
        self._sums = {}
