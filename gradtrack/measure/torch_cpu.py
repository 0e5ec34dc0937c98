"""The torch engine on the CPU: pieces that fit into the cache, small tensors side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gradtrack.measure.moments import Rows, empty_row

_PIECE: Final = 1 << 20
_LINE: Final = 1 << 12
_SMALL: Final = 1 << 12
_LARGEST, _SMALLEST = 1e18, 1e-12
"""Beyond these magnitudes the squares of float32 elements overflow, or lose so many bits that it shows."""


def measure(grads: Sequence[Tensor], exponent: int = 0) -> Rows:
    """Return a row of sums for each tensor."""
    rows = np.empty((len(grads), 8))
    small: dict[tuple[torch.dtype, int], list[int]] = {}
    for index, grad in enumerate(grads):
        if 0 < grad.numel() <= _SMALL and not exponent:
            small.setdefault((grad.dtype, grad.numel()), []).append(index)
        else:
            rows[index] = _measure_large(grad.detach(), exponent)
    for (_, size), indices in small.items():
        step = max(1, _PIECE // size)
        for start in range(0, len(indices), step):
            part = indices[start : start + step]
            rows[part] = _measure_small([grads[index].detach() for index in part])
    return rows


def _measure_small(grads: Sequence[Tensor]) -> Rows:
    """Measure tensors of one size together, as the lines of a matrix."""
    lines = torch.stack([flat(grad) for grad in grads])
    values = lines if lines.dtype == torch.float64 else lines.float()
    norms = torch.linalg.vector_norm(values, dim=1).double()
    low, high = torch.aminmax(values, dim=1)
    rows = np.zeros((len(grads), 8))
    rows[:, 0] = values.sum(dim=1).numpy()
    rows[:, 1] = (norms * norms).numpy()
    rows[:, 2], rows[:, 3] = low.numpy(), high.numpy()
    rows[:, 4] = torch.eq(values, 0, out=torch.empty_like(values)).sum(dim=1).numpy()
    for index in np.flatnonzero(_doubtful(rows, values.shape[1])):
        rows[index] = _carefully(lines[index], 0)
    return rows


def _measure_large(grad: Tensor, exponent: int) -> list[float]:
    row = empty_row()
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    line = flat(grad)
    for start in range(0, line.numel(), _PIECE):
        piece = line[start : start + _PIECE]
        _add(row, _carefully(piece, exponent) if exponent else _quickly(piece.to(wide)))
    return row


def _quickly(values: Tensor) -> Sequence[float]:
    """Measure a piece in its own precision, a line at a time, and again with care where that may be wrong."""
    size = values.numel()
    whole = size - size % _LINE if size > _LINE else size
    lines = values[:whole].view(-1, min(_LINE, whole))
    norms = torch.linalg.vector_norm(lines, dim=1).double()
    sums = lines.sum(dim=1).double()
    low, high = torch.aminmax(values)
    zeros = size - int(torch.count_nonzero(values))
    row = [float(sums.sum()), float(torch.dot(norms, norms)), float(low), float(high), float(zeros)]
    if whole < size:
        rest = values[whole:].double()
        row[0] += float(rest.sum())
        row[1] += float(torch.dot(rest, rest))
    found = np.array([[*row, 0.0, 0.0, 0.0]])
    return _carefully(values, 0) if _doubtful(found, size)[0] else found[0].tolist()


def _doubtful(rows: Rows, size: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Say which rows have non-finite elements, squares out of range, or a mean that hides the variance."""
    largest = np.maximum(np.abs(rows[:, 2]), np.abs(rows[:, 3]))
    with np.errstate(invalid="ignore", over="ignore"):
        cancels = rows[:, 0] ** 2 > 0.5 * size * rows[:, 1]
        inside = (largest < _LARGEST) & ((largest > _SMALLEST) | (largest == 0.0))
        found: np.ndarray[tuple[int], np.dtype[np.bool_]] = ~inside | cancels | ~np.isfinite(rows[:, 1])
    return found


def _carefully(piece: Tensor, exponent: int) -> list[float]:
    """Measure the finite elements of a piece in float64, divided by 2**exponent, and count the others."""
    values = piece.double()
    if exponent:  # in two halves, since 2**-exponent itself may be out of range
        half = -exponent // 2
        values = values * math.ldexp(1.0, half) * math.ldexp(1.0, -exponent - half)
    row = empty_row()
    row[4] = float(piece.numel() - int(torch.count_nonzero(piece)))
    finite = values.isfinite()
    if not bool(finite.all()):
        row[5] = float(values.isnan().sum())
        row[6] = float(values.isposinf().sum())
        row[7] = float(values.isneginf().sum())
        values = values[finite]
    if values.numel():
        row[0], row[1] = float(values.sum()), float(torch.dot(values, values))
        row[2], row[3] = float(values.amin()), float(values.amax())
    return row


def _add(row: list[float], more: Sequence[float]) -> None:
    for index, value in enumerate(more):
        if index == 2:
            row[2] = min(row[2], value)
        elif index == 3:
            row[3] = max(row[3], value)
        else:
            row[index] += value


def flat(grad: Tensor) -> Tensor:
    """View a tensor as one line of elements in the order of its memory; copy only where it has gaps."""
    if grad.is_contiguous():
        return grad.view(-1)
    order = sorted(range(grad.ndim), key=grad.stride, reverse=True)
    inner = grad.permute(order)
    return inner.view(-1) if inner.is_contiguous() else grad.reshape(-1)
