"""The engine that measures with torch operations, on any device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.measure.moments import Rows, empty_row, merge

_CHUNK: Final = 1 << 20


class TorchEngine:
    """Measures tensors one after the other, in pieces that are small beside the gradients."""

    name = "torch"

    def measure(
        self, grads: Sequence[Tensor], group_of: NDArray[np.int64], num_groups: int, *, exponent: int = 0
    ) -> tuple[Rows, Rows, list[float]]:
        """Return the rows of the tensors, of the groups and of everything."""
        rows = np.array([_row(grad, exponent) for grad in grads], dtype=np.float64).reshape(len(grads), 8)
        groups, total = merge(rows, group_of, num_groups)
        return rows, groups, total

    def scale(self, grads: Sequence[Tensor], coefficient: float) -> None:
        """Multiply every tensor in place."""
        if grads:
            torch._foreach_mul_(list(grads), coefficient)


def _row(grad: Tensor, exponent: int) -> list[float]:
    row = empty_row()
    for piece in _pieces(grad.detach()):
        values = piece.double()
        if exponent:  # in two halves, since 2**-exponent itself may be out of range
            half = -exponent // 2
            values = values * math.ldexp(1.0, half) * math.ldexp(1.0, -exponent - half)
        squares = float(torch.dot(values, values))
        total = float(values.sum())
        if not (math.isfinite(squares) and math.isfinite(total)):
            values, squares, total = _finite_part(values, row)
        if values.numel():
            low, high = torch.aminmax(values)
            row[0] += total
            row[1] += squares
            row[2] = min(row[2], float(low))
            row[3] = max(row[3], float(high))
            row[4] += piece.numel() - int(torch.count_nonzero(piece))
    return row


def _finite_part(values: Tensor, row: list[float]) -> tuple[Tensor, float, float]:
    row[5] += int(torch.isnan(values).sum())
    row[6] += int(torch.isposinf(values).sum())
    row[7] += int(torch.isneginf(values).sum())
    values = values[torch.isfinite(values)]
    return values, float(torch.dot(values, values)), float(values.sum())


def _pieces(grad: Tensor) -> Iterator[Tensor]:
    flat = _flat(grad)
    for start in range(0, flat.numel(), _CHUNK):
        yield flat[start : start + _CHUNK]


def _flat(grad: Tensor) -> Tensor:
    """View a tensor as one row of elements in the order of its memory; copy only where it has gaps."""
    if grad.is_contiguous():
        return grad.view(-1)
    order = sorted(range(grad.ndim), key=lambda dim: grad.stride(dim), reverse=True)
    inner = grad.permute(order)
    return inner.view(-1) if inner.is_contiguous() else grad.reshape(-1)
