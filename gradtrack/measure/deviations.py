"""The variance of gradients that lie close together and far from zero, from a second pass over them."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.measure.gradients import Gradients
from gradtrack.measure.moments import MAX, MIN, NAN, SQUARES, SUM, Moments, Rows
from gradtrack.measure.torch_cpu import flat
from gradtrack.measure.torch_device import WITHOUT_FLOAT64

_HIDDEN: Final = 1e-6
"""A variance below this share of the mean square has lost more than six of its sixteen digits."""
_PIECE: Final = 1 << 20
Floats = NDArray[np.float64]


class Deviations(NamedTuple):
    """Sums of squared deviations from the mean, in the units of the moments: of tensors, groups and everything."""

    rows: Floats
    groups: Floats
    total: float


def find_deviations(grads: Gradients, moments: Moments) -> Deviations | None:
    """Return the deviations where the difference of two sums does not tell them, and mostly nothing.

    Only tensors whose mean hides their variance are read again; not over ranks, which would have to send it.
    """
    rows = moments.rows
    if len(rows) != len(grads.tensors) or not len(rows):
        return None  # gradients that are gone by now
    if max(rows[:, MIN].tolist()) <= 0.0 <= min(rows[:, MAX].tolist()):
        return (
            None  # no tensor has all elements on one side of zero, so none has less variance than its mean squared / n
        )
    counts = grads.layout.sizes if moments.finite else grads.layout.sizes - rows[:, NAN:].sum(axis=1)
    hidden = _hides(rows, counts)
    if not hidden.any():
        return None  # where it is hidden in no tensor, it is hidden in no group of them either
    if not (counts[hidden] > 1).any():  # tensors of one element have no variance of their own, only together
        whole = np.vstack([moments.group_rows, moments.total])
        sizes = np.array([*grads.layout.group_counts, grads.layout.total_count]) - whole[:, NAN:].sum(axis=1)
        if not (_hides(whole, sizes) & (sizes > 1)).any():
            return None
    return _merge(grads, moments, counts.astype(np.float64), hidden)


def _hides(rows: Rows, counts: NDArray[Any]) -> NDArray[np.bool_]:
    """Say which rows have a variance that is next to nothing beside the square of their mean."""
    with np.errstate(over="ignore"):
        found: NDArray[np.bool_] = rows[:, SUM] ** 2 > (1.0 - _HIDDEN) * counts * rows[:, SQUARES]
    return found


def _merge(grads: Gradients, moments: Moments, counts: Floats, hidden: NDArray[np.bool_]) -> Deviations:
    """Add up the deviations of tensors and those of their means, each mean as a difference to a middle one."""
    rows, number = moments.rows, np.maximum(counts, 1.0)
    constant = hidden & (rows[:, MIN] == rows[:, MAX])
    means = np.where(constant, rows[:, MIN], rows[:, SUM] / number)
    squares = np.maximum(rows[:, SQUARES] - means * rows[:, SUM], 0.0)
    again = np.flatnonzero(hidden & ~constant)
    found = np.zeros((len(rows), 2))
    for index in again:
        found[index] = _sums(grads.tensors[index], float(means[index]), moments.exponent)
    shifts = found[:, 0] / number
    squares[hidden] = 0.0
    squares[again] = np.maximum(found[again, 1] - found[again, 0] * shifts[again], 0.0)
    middle = float(means[np.argmax(counts)])
    apart = (means - middle) + shifts
    group_of, num_groups = grads.layout.group_of, len(grads.layout.group_names)
    groups = _together(squares, apart, counts, group_of, num_groups)
    return Deviations(squares, groups, float(_together(squares, apart, counts, np.zeros_like(group_of), 1)[0]))


def _together(squares: Floats, means: Floats, counts: Floats, group_of: NDArray[np.int64], num_groups: int) -> Floats:
    """Return the squared deviations of groups from those of their parts."""
    sizes: Floats = np.maximum(np.bincount(group_of, counts, num_groups), 1.0)
    middles = np.bincount(group_of, counts * means, num_groups) / sizes
    between = counts * (means - middles[group_of]) ** 2
    return np.bincount(group_of, squares + between, num_groups).astype(np.float64, copy=False)


def _sums(grad: Tensor, center: float, exponent: int) -> tuple[float, float]:
    """Return the sum of the finite elements' deviations from a center, and of their squares."""
    wide = torch.float32 if grad.device.type in WITHOUT_FLOAT64 else torch.float64
    first, second = 0.0, 0.0
    for piece in torch.split(flat(grad.detach()), _PIECE):
        values = piece.to(wide)
        if exponent:  # in two halves, since 2**-exponent itself may be out of range
            half = -exponent // 2
            values = values * math.ldexp(1.0, half) * math.ldexp(1.0, -exponent - half)
        values = torch.where(values.isfinite(), values - center, 0.0)
        first += float(values.sum())
        second += float(torch.dot(values, values))
    return first, second
