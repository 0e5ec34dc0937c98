"""How much one training step's gradient points where the last one did."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gradtrack.measure.samples import as_real


class GradientCoherence:
    """The mean cosine between the gradients of consecutive steps; it keeps one copy of the gradients."""

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        self._cosines: list[float] = []

    def add(self, model: nn.Module) -> None:
        """Take in the gradients that are there now."""
        now = {name: param.grad.detach().clone() for name, param in model.named_parameters() if param.grad is not None}
        if self._before:
            self._cosines.append(_cosine(self._before, now))
        self._before = now

    def mean(self) -> float | None:
        """Return the mean over the steps so far, or None before the second."""
        known = [cosine for cosine in self._cosines if not math.isnan(cosine)]
        return sum(known) / len(known) if known else None


def _cosine(before: dict[str, Tensor], now: dict[str, Tensor]) -> float:
    shared = [name for name in now if name in before and not now[name].is_sparse and not before[name].is_sparse]
    if not shared:
        return math.nan
    sums = torch.tensor([_products(before[name], now[name]) for name in shared], dtype=torch.float64).sum(0)
    size = math.sqrt(float(sums[1]) * float(sums[2]))
    return float(sums[0]) / size if size > 0 else math.nan


def _products(before: Tensor, now: Tensor) -> tuple[float, float, float]:
    first, second = as_real(before).double().flatten(), as_real(now).double().flatten()
    return float(first @ second), float(first @ first), float(second @ second)
