"""Exact variance of gradients with a large mean: sums about a centre, in one process and over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.gradients.moments import MAX, MIN, NAN, SQUARES, SUM, Rows
from gradtrack.gradients.torch_cpu import flat
from gradtrack.gradients.torch_device import WITHOUT_FLOAT64, halves_of

_HIDDEN: Final = 1e-6
"""A variance below this share of the mean square has lost more than six of its sixteen digits."""
_PIECE: Final = 1 << 20
Floats = NDArray[np.float64]


class Deviations(NamedTuple):
    """Sums of squared deviations from the mean, in the units of the moments: of tensors, groups and everything."""

    rows: Floats
    groups: Floats
    total: float


class CentredSums(NamedTuple):
    """Sums of parameters about centres near their means: shifts of the means, squared deviations, element counts."""

    centres: Floats
    shifts: Floats
    squares: Floats
    counts: Floats

    def deviations(self, positions: NDArray[np.int64], group_of: NDArray[np.int64], num_groups: int) -> Deviations:
        """Return the deviations of the parameters at these positions and of their groups."""
        return merge_deviations(CentredSums(*(values[positions] for values in self)), group_of, num_groups)


def is_hidden(total: Any, squares: Any, count: Any) -> Any:
    """Say whether the mean hides the variance: it is less than 1e-6 of the mean square in these two sums."""
    return total * total > (1.0 - _HIDDEN) * count * squares


def hides(rows: Rows, counts: NDArray[Any]) -> NDArray[np.bool_]:
    """Say of which rows the mean hides the variance."""
    with np.errstate(over="ignore"):
        found: NDArray[np.bool_] = is_hidden(rows[:, SUM], rows[:, SQUARES], counts)
    return found


def centres_between(lows: Floats, highs: Floats) -> Floats:
    """Return a centre between these ends; 0 unless they lie on one side of zero and close together.

    Only there can the mean hide the variance: an element at half the mean makes it a share of one in four times the
    number of elements at least.
    """
    near, far = np.minimum(np.abs(lows), np.abs(highs)), np.maximum(np.abs(lows), np.abs(highs))
    close = (lows <= highs) & (np.sign(lows) == np.sign(highs)) & (far / 2 <= near)
    with np.errstate(invalid="ignore"):
        return np.where(close, np.where(lows == highs, lows, lows / 2 + highs / 2), 0.0)


def sums_around(tensors: Sequence[Tensor], rows: Rows, counts: NDArray[Any], centres: Floats, exponent: int) -> Floats:
    """Return the sum of the elements and of their squares once a centre is taken from each, in the units of the rows.

    A tensor is read again only if its mean hides its variance, and if it still exists.
    """
    found, finite = rows[:, [SUM, SQUARES]], counts - rows[:, NAN:].sum(axis=1)
    hidden = hides(rows, finite)
    for index in np.flatnonzero(centres).tolist():
        row, count, center = rows[index], finite[index], float(np.ldexp(centres[index], -exponent))
        if row[MIN] == row[MAX]:
            apart = row[MIN] - center
            found[index] = count * apart, count * apart * apart
        elif hidden[index] and tensors:
            found[index] = deviations_from(tensors[index], center, exponent)
        else:
            squares = row[SQUARES] - center * (2 * row[SUM] - count * center)
            found[index] = row[SUM] - count * center, max(squares, 0.0)
    return found


def take_back(rows: Rows, centres: Floats, counts: Floats) -> CentredSums:
    """Convert sums about centres to plain sums, in place; return the deviations that they contain."""
    number = np.maximum(counts, 1.0)
    shifts = rows[:, SUM] / number
    squares = np.maximum(rows[:, SQUARES] - rows[:, SUM] * shifts, 0.0)
    rows[:, SQUARES] += centres * (2 * rows[:, SUM] + counts * centres)
    rows[:, SUM] += counts * centres
    return CentredSums(centres, shifts, squares, counts)


class Parts(NamedTuple):
    """Sums of parts of tensors, each about a centre among its elements: of the deviations and of their squares."""

    centres: Floats
    sums: Floats
    squares: Floats
    counts: Floats
    tensor_of: NDArray[np.int64]


def deviations_of_parts(
    parts: Parts, rows: Rows, sizes: NDArray[np.int64], group_of: NDArray[np.int64], num_groups: int
) -> Deviations | None:
    """Return the deviations if the mean of any tensor hides its variance; tensors without parts have that of a row."""
    counts = sizes - rows[:, NAN:].sum(axis=1)
    if not hides(rows, counts).any():
        return None
    rest = np.setdiff1d(np.arange(len(rows)), parts.tensor_of)
    centres = np.concatenate([parts.centres, np.zeros(len(rest))])
    sums = np.concatenate([parts.sums, rows[rest, SUM]])
    squares = np.concatenate([parts.squares, rows[rest, SQUARES]])
    counts = np.concatenate([parts.counts, counts[rest]])
    of = np.concatenate([parts.tensor_of, rest])
    shifts = sums / np.maximum(counts, 1.0)
    centred = CentredSums(centres, shifts, np.maximum(squares - sums * shifts, 0.0), counts)
    whole = merge_deviations(centred, group_of[of], num_groups)
    return Deviations(merge_deviations(centred, of, len(rows)).groups, whole.groups, whole.total)


def merge_deviations(parts: CentredSums, group_of: NDArray[np.int64], num_groups: int) -> Deviations:
    """Merge the deviations of tensors and of their means, each mean as a difference to a common one."""
    middle = float(parts.centres[np.argmax(parts.counts)]) if len(parts.counts) else 0.0
    apart = (parts.centres - middle) + parts.shifts
    groups = _together(parts, apart, group_of, num_groups)
    return Deviations(parts.squares, groups, float(_together(parts, apart, np.zeros_like(group_of), 1)[0]))


def _together(parts: CentredSums, means: Floats, group_of: NDArray[np.int64], num_groups: int) -> Floats:
    """Return the squared deviations of groups, merged from those of their tensors."""
    counts = parts.counts
    sizes: Floats = np.maximum(np.bincount(group_of, counts, num_groups), 1.0)
    middles = np.bincount(group_of, counts * means, num_groups) / sizes
    between = counts * (means - middles[group_of]) ** 2
    return np.bincount(group_of, parts.squares + between, num_groups).astype(np.float64, copy=False)


def deviations_from(grad: Tensor, center: float, exponent: int) -> tuple[float, float]:
    """Return the sum of the finite elements' deviations from a center, and of their squares."""
    wide = torch.float32 if grad.device.type in WITHOUT_FLOAT64 else torch.float64
    first, second = 0.0, 0.0
    for piece in torch.split(flat(grad.detach()), _PIECE):
        values = piece.to(wide)
        for factor in halves_of(exponent) if exponent else ():
            values = values * factor
        values = torch.where(values.isfinite(), values - center, 0.0)
        first += float(values.sum())
        second += float(torch.dot(values, values))
    return first, second
