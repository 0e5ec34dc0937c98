"""The noise of gradients: sampled over micro-batches, and the noise scale that follows from it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

from gradtrack.analyzers.tools.hooks import Faults
from gradtrack.analyzers.tools.samples import read_together, weighed_sample
from gradtrack.support.interrupts import Changes
from gradtrack.support.statistics import cosine, mean


@final
class GradientNoise:
    """Sums over gradients g_i, from which follow their coherence, their noise scale and the cosine of neighbours.

    It keeps the sum of the gradients and the last one. Gradients may be samples of their elements, the same ones each,
    if those of every tensor are weighed by how many they stand for.
    """

    def __init__(self, gradients: Iterable[Tensor] = ()) -> None:
        self.count = 0
        self._sum: Tensor | None = None
        self._last: Tensor | None = None
        self._squares: list[Tensor] = []
        self._products: list[Tensor] = []
        self._read: list[float] | None = None
        for gradient in gradients:
            self.add(gradient)

    def add(self, gradient: Tensor) -> None:
        """Take in one gradient as a flat vector."""
        values = gradient.detach().double().reshape(-1)
        self._squares.append(values @ values)
        if self._last is not None:
            self._products.append(self._last @ values)
        self.count += 1
        self._sum = values.clone() if self._sum is None else self._sum + values
        self._last, self._read = values, None

    @property
    def coherence(self) -> float | None:
        """Return α = ‖mean g‖² / mean ‖g_i‖², from 1/m for orthogonal gradients to 1 for equal ones (2008.01217)."""
        squared_mean, mean_square = self._means()
        if self.count < 2 or not 0 < mean_square < math.inf:
            return None
        return min(1.0, squared_mean / mean_square)

    @property
    def noise_scale(self) -> float | None:
        """Return tr Σ / ‖G‖² in batches of one gradient (McCandlish et al. 2018); None where ‖G‖² is lost in noise."""
        if self.count < 2:
            return None
        m, (mean, squares) = self.count, self._means()
        signal = (m * mean - squares) / (m - 1)
        return max(squares - mean, 0.0) / (1 - 1 / m) / signal if signal > 0 else None

    @property
    def temporal(self) -> float | None:
        """Return the mean cosine between one gradient and the next."""
        squares, products, _ = self._numbers()
        cosines = map(cosine, products, squares, squares[1:])
        return mean(value for value in cosines if not math.isnan(value))

    def _means(self) -> tuple[float, float]:
        """Return ‖mean g‖² and mean ‖g_i‖²."""
        squares, _, total = self._numbers()
        return total / self.count**2, sum(squares) / max(1, self.count)

    def _numbers(self) -> tuple[list[float], list[float], float]:
        """Return the squares of the gradients, the products of neighbours and the square of the sum, read together."""
        if self._sum is None:
            return [], [], 0.0
        if self._read is None:
            parts = [*self._squares, *self._products, self._sum @ self._sum]
            self._read = torch.stack(read_together(parts)).tolist()
        return self._read[: self.count], self._read[self.count : -1], self._read[-1]


class MicroBatches:
    """Hooks that sample each parameter's gradient whenever a backward pass has added to it."""

    def __init__(self, model: nn.Module, changes: Changes, most: int) -> None:
        itself, self._most = weakref.ref(self), most
        self._sums: dict[int, list[Tensor]] = {}

        def accumulated(param: Tensor) -> None:
            owner = itself()
            if owner is not None and type(param.grad) is Tensor and param.grad.layout is torch.strided:
                owner._sums.setdefault(id(param), []).append(weighed_sample(param.grad, owner._most))

        self._faults = Faults()
        guarded = self._faults.guarded(accumulated)
        for param in model.parameters():
            if param.requires_grad:
                changes.hook(param.register_post_accumulate_grad_hook, guarded)

    def noise(self) -> GradientNoise | None:
        """Return the noise over the micro-batches; None where there was a single one."""
        self._faults.check()
        count = max(map(len, self._sums.values()), default=0)
        parts = [sums for sums in self._sums.values() if len(sums) == count]
        if count < 2:
            return None
        totals = [torch.cat([sums[index] for sums in parts]) for index in range(count)]
        return GradientNoise([totals[0], *(after - before for before, after in pairwise(totals))])
