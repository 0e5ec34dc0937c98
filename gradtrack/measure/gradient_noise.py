"""How much several gradients at the same weights agree: their coherence and their noise scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor


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
        self._squares = 0.0
        self._cosines: list[float] = []
        for gradient in gradients:
            self.add(gradient)

    def add(self, gradient: Tensor) -> None:
        """Take in one gradient as a flat vector."""
        values = gradient.detach().double().reshape(-1)
        if self._last is not None:
            self._cosines.append(cosine(self._last, values))
        self.count += 1
        self._sum = values.clone() if self._sum is None else self._sum + values
        self._squares += float(values @ values)
        self._last = values

    @property
    def coherence(self) -> float | None:
        """Return α = ‖mean g‖² / mean ‖g_i‖², from 1/m for orthogonal gradients to 1 for equal ones (2008.01217)."""
        if self.count < 2 or self._sum is None or not 0 < self._squares < math.inf:
            return None
        return min(1.0, self._squared_mean(self._sum) / (self._squares / self.count))

    @property
    def noise_scale(self) -> float | None:
        """Return tr Σ / ‖G‖² in batches of one gradient (McCandlish et al. 2018); None where ‖G‖² is lost in noise."""
        if self.count < 2 or self._sum is None:
            return None
        m, mean, squares = self.count, self._squared_mean(self._sum), self._squares / self.count
        signal = (m * mean - squares) / (m - 1)
        return max(squares - mean, 0.0) / (1 - 1 / m) / signal if signal > 0 else None

    @property
    def temporal(self) -> float | None:
        """Return the mean cosine between one gradient and the next."""
        known = [value for value in self._cosines if not math.isnan(value)]
        return sum(known) / len(known) if known else None

    def _squared_mean(self, total: Tensor) -> float:
        return float(total @ total) / self.count**2


def cosine(first: Tensor, second: Tensor) -> float:
    """Return the cosine of the angle between two flat vectors; NaN where one of them is zero or not finite."""
    first, second = first.double(), second.double()
    size = float(torch.linalg.vector_norm(first) * torch.linalg.vector_norm(second))
    return max(-1.0, min(1.0, float(first @ second) / size)) if 0 < size < math.inf else math.nan
