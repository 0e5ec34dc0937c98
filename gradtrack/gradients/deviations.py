"""The variance of gradients that lie close together and far from zero, from a second pass over them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradtrack.gradients.collected import Gradients
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.moments import MAX, MIN, NAN, SQUARES, SUM, Moments
from gradtrack.gradients.variance import (
    Centred,
    Deviations,
    Floats,
    deviations_from,
    hides,
    is_hidden,
    merge_deviations,
)


def find_deviations(grads: Gradients, moments: Moments) -> Deviations | None:
    """Return the squared deviations if the mean hides a variance, and None on most steps.

    Only tensors whose mean hides their variance are read again. Ranks that share the parameters find them in the
    all-reduce instead.
    """
    rows, layout = moments.rows, grads.layout
    if len(rows) != len(grads.tensors) or not len(rows):
        return None  # gradients that the optimizers have used inside the backward pass
    if moments.finite and not _is_any_hidden(layout, moments):
        return None
    counts = layout.sizes if moments.finite else layout.sizes - rows[:, NAN:].sum(axis=1)
    hidden = hides(rows, counts)
    return _merge(grads, moments, counts.astype(np.float64), hidden) if hidden.any() else None


def _is_any_hidden(layout: Layout, moments: Moments) -> bool:
    """Say whether the variance of any tensor, group or of everything is hidden, which it is not on most steps.

    The variance of a tensor whose elements lie on both sides of zero is never hidden, and that of a group only if the
    variance of one of its tensors is. A single element has no variance of its own.
    """
    if not moments.one_sided:
        return False
    rows, counts = moments.rows, layout.counts
    found: list[int] = []
    for index in np.flatnonzero((rows[:, MIN] > 0.0) | (rows[:, MAX] < 0.0)).tolist():
        if is_hidden(float(rows[index, SUM]), float(rows[index, SQUARES]), counts[index]):
            if counts[index] > 1:
                return True
            found.append(index)
    if not found:
        return False
    groups = set(layout.group_of[found].tolist())
    wholes = [(moments.group_rows[group].tolist(), layout.group_counts[group]) for group in groups]
    wholes.append((moments.total, layout.total_count))
    return any(count > 1 and is_hidden(row[SUM], row[SQUARES], count) for row, count in wholes)


def _merge(grads: Gradients, moments: Moments, counts: Floats, hidden: NDArray[np.bool_]) -> Deviations:
    """Read tensors with a hidden variance again, each about its mean, and merge all deviations."""
    rows, number = moments.rows, np.maximum(counts, 1.0)
    constant = hidden & (rows[:, MIN] == rows[:, MAX])
    means = np.where(constant, rows[:, MIN], rows[:, SUM] / number)
    squares = np.maximum(rows[:, SQUARES] - means * rows[:, SUM], 0.0)
    again = np.flatnonzero(hidden & ~constant)
    found = np.zeros((len(rows), 2))
    for index in again:
        found[index] = deviations_from(grads.tensors[index], float(means[index]), moments.exponent)
    shifts = found[:, 0] / number
    squares[hidden] = 0.0
    squares[again] = np.maximum(found[again, 1] - found[again, 0] * shifts[again], 0.0)
    parts = Centred(means, shifts, squares, counts)
    return merge_deviations(parts, grads.layout.group_of, len(grads.layout.group_names))
