"""The torch engine on the CPU: sums over pieces that fit into the cache, small tensors of one size together."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.gradients.moments import MIN, SQUARES, SUM, ZEROS, Rows, empty_row, merge

_PIECE: Final = 1 << 19
_LINE: Final = 1 << 12
_SMALL: Final = 1 << 12
_LARGEST, _SMALLEST = 1e18, 1e-12
"""Beyond these magnitudes the squares of float32 elements overflow, or lose so many bits that it shows."""


def measure(grads: Sequence[Tensor], exponent: int = 0) -> Rows:
    """Return a row of sums for each tensor."""
    rows = np.tile(np.array(empty_row()), (len(grads), 1))
    small: dict[tuple[torch.dtype, int], list[int]] = {}
    large: list[int] = []
    for index, grad in enumerate(grads):
        if 0 < grad.numel() <= _SMALL and not exponent:
            small.setdefault((grad.dtype, grad.numel()), []).append(index)
        else:
            large.append(index)
    for (_, size), indices in small.items():
        step = max(1, _PIECE // size)
        for start in range(0, len(indices), step):
            part = indices[start : start + step]
            rows[part] = _measure_small([grads[index].detach() for index in part])
    if large:
        rows[large] = _measure_large([flat(grads[index].detach()) for index in large], exponent)
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
    if values.shape[1] == 1:  # the square of a norm would be rounded
        with np.errstate(over="ignore"):
            rows[:, 1] = rows[:, 2] ** 2
    # A single element has no variance that its mean could hide.
    for index in np.flatnonzero(_doubtful(rows, max(values.shape[1], 2))):
        rows[index] = _carefully(lines[index], 0)
    return rows


def _measure_large(lines: Sequence[Tensor], exponent: int) -> Rows:
    pieces = [
        (index, line[start : start + _PIECE])
        for index, line in enumerate(lines)
        for start in range(0, line.numel(), _PIECE)
    ]
    table = _measure_pieces([piece for _, piece in pieces], careful=bool(exponent))
    for position in np.flatnonzero(_doubtful(table, np.array([piece.numel() for _, piece in pieces]))):
        table[position] = _carefully(pieces[position][1], exponent)
    return merge(table, np.array([index for index, _ in pieces], dtype=np.int64), len(lines))[0]


def _measure_pieces(pieces: Sequence[Tensor], *, careful: bool) -> Rows:
    """Measure pieces in their own precision, a line at a time; read the sums of all lines at the end."""
    table = np.zeros((len(pieces), 8))
    if careful or not pieces:
        table[:, SQUARES] = math.nan
        return table
    norms: list[Rows] = []
    sums: list[Rows] = []
    starts, longest = [], max(map(Tensor.numel, pieces))
    marks = {dtype: torch.empty(longest, dtype=dtype) for dtype in (torch.float32, torch.float64)}  # stays in the cache
    for position, piece in enumerate(pieces):
        values = piece if piece.dtype == torch.float64 else piece.float()
        starts.append(len(norms))
        for part in _lines(values):
            norms.append(torch.linalg.vector_norm(part, dim=1).numpy())
            sums.append(part.sum(dim=1).numpy())
        low, high = torch.aminmax(values)
        # To add up marks of the same type is faster than `count_nonzero`.
        zeros = torch.eq(values, 0, out=marks[values.dtype][: values.numel()]).sum()
        table[position, MIN : ZEROS + 1] = low, high, zeros
    firsts = np.cumsum([0, *map(len, norms)])[starts]
    table[:, SUM] = np.add.reduceat(np.concatenate(sums, dtype=np.float64), firsts)
    table[:, SQUARES] = np.add.reduceat(np.concatenate(norms, dtype=np.float64) ** 2, firsts)
    return table


def _lines(values: Tensor) -> Iterator[Tensor]:
    """Yield the elements as lines of a matrix, and the rest that fills no line as one of its own."""
    whole = values.numel() - values.numel() % _LINE
    if whole:
        yield values[:whole].view(-1, _LINE)
    if whole < values.numel():
        yield values[whole:].view(1, -1)


def _doubtful(rows: Rows, size: int | NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say which rows have non-finite elements, squares out of range, or a mean that hides the variance."""
    largest = np.maximum(np.abs(rows[:, 2]), np.abs(rows[:, 3]))
    with np.errstate(invalid="ignore", over="ignore"):
        cancels = rows[:, 0] ** 2 > 0.5 * size * rows[:, 1]
        inside = (largest < _LARGEST) & ((largest > _SMALLEST) | (largest == 0.0))
        found: NDArray[np.bool_] = ~inside | cancels | ~np.isfinite(rows[:, 1])
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


def flat(grad: Tensor) -> Tensor:
    """View a tensor as one line of elements in the order of its memory; copy only where it has gaps."""
    if grad.is_contiguous():
        return grad.view(-1)
    order = sorted(range(grad.ndim), key=grad.stride, reverse=True)
    inner = grad.permute(order)
    return inner.view(-1) if inner.is_contiguous() else grad.reshape(-1)


PLAIN_TYPES: Final = frozenset({Tensor, nn.Parameter})


def is_plain(grad: Tensor, dtypes: Container[torch.dtype]) -> bool:
    """Say whether a compiled engine can read a gradient in place: of one of the types, dense and without gaps."""
    return (
        type(grad) in PLAIN_TYPES
        and grad.layout is torch.strided
        and grad.dtype in dtypes
        and not grad.is_neg()
        and not grad._is_zerotensor()
        and (grad.is_contiguous() or _is_dense(grad))
    )


def _is_dense(grad: Tensor) -> bool:
    """Say whether the elements fill a stretch of memory once each, in whatever order of dimensions."""
    step = 1
    for stride, size in sorted(pair for pair in zip(grad.stride(), grad.shape, strict=True) if pair[1] != 1):
        if stride != step:
            return False
        step *= size
    return True
