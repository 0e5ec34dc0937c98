"""The variance of gradients that lie close together and far from zero, from a second pass over them."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.measure.gradients import Gradients, Layout
from gradtrack.measure.moments import MAX, MIN, NAN, SQUARES, SUM, Moments
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
    rows, layout = moments.rows, grads.layout
    if len(rows) != len(grads.tensors) or not len(rows):
        return None  # gradients that are gone by now
    if moments.finite and not _is_any_hidden(layout, moments):
        return None
    counts = layout.sizes if moments.finite else layout.sizes - rows[:, NAN:].sum(axis=1)
    with np.errstate(over="ignore"):
        hidden = _hides(rows[:, SUM], rows[:, SQUARES], counts)
    return _merge(grads, moments, counts.astype(np.float64), hidden) if hidden.any() else None


def _is_any_hidden(layout: Layout, moments: Moments) -> bool:
    """Say whether the variance of any tensor, group or of everything is hidden, which it is not on most steps.

    None is of a tensor whose elements lie on both sides of zero, nor of a group in which it is of no tensor. One
    element has no variance of its own. The few that are left are looked at one by one: arrays would take longer.
    """
    rows, counts = moments.rows, layout.counts
    found: list[int] = []
    for index, (low, high) in enumerate(zip(rows[:, MIN].tolist(), rows[:, MAX].tolist(), strict=True)):
        if (low > 0.0 or high < 0.0) and _hides(float(rows[index, SUM]), float(rows[index, SQUARES]), counts[index]):
            if counts[index] > 1:
                return True
            found.append(index)
    if not found:
        return False
    groups = set(layout.group_of[found].tolist())
    wholes = [(moments.group_rows[group].tolist(), layout.group_counts[group]) for group in groups]
    wholes.append((moments.total, layout.total_count))
    return any(count > 1 and _hides(row[SUM], row[SQUARES], count) for row, count in wholes)


def _hides(total: Any, squares: Any, count: Any) -> Any:
    """Say whether a sum and a sum of squares have a variance that is next to nothing beside the mean's square."""
    return total * total > (1.0 - _HIDDEN) * count * squares


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
