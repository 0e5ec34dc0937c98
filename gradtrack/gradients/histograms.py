"""Histograms of gradients over buckets that are the same at every step: the powers of two, on both sides of zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.records import Histogram

LOWEST: Final = -64
HIGHEST: Final = 128
_SIDE: Final = HIGHEST - LOWEST
_PART: Final = 2**22
_POSITIVE: Final = np.ldexp(1.0, np.arange(LOWEST, HIGHEST + 1))
EDGES: Final = np.concatenate([-_POSITIVE[::-1], _POSITIVE])


def count_elements(tensors: Sequence[Tensor], group_of: Iterable[int], num_groups: int) -> NDArray[np.float64]:
    """Count the finite elements of each group between consecutive `EDGES`; the upper one belongs to the next bucket.

    The bucket in the middle holds all elements below 2**-64, the outermost ones also those beyond the edges.
    """
    counts = np.zeros((num_groups, len(EDGES) - 1))
    for tensor, group in zip(tensors, group_of, strict=True):
        for part in torch.split(tensor.detach().reshape(-1), _PART):
            counts[group] += _count(part).cpu().numpy()
    return counts


def histograms_of(counts: NDArray[np.float64], names: Sequence[str]) -> dict[str, Histogram]:
    """Return the histogram of the whole, under the empty name, and of each named group that has a finite element."""
    rows = {"": counts.sum(axis=0), **dict(zip(names, counts, strict=False))}
    found = {name: to_histogram(row) for name, row in rows.items()}
    return {name: histogram for name, histogram in found.items() if histogram is not None}


def to_histogram(counts: NDArray[np.float64]) -> Histogram | None:
    """Return a histogram of the buckets from the first to the last that holds an element; None without elements."""
    (filled,) = np.nonzero(counts)
    if not len(filled):
        return None
    first, last = int(filled[0]), int(filled[-1]) + 1
    return Histogram(edges=tuple(EDGES[first : last + 1].tolist()), counts=tuple(counts[first:last].tolist()))


def _count(values: Tensor) -> Tensor:
    """Return the counts of all buckets, which follow from the exponents; a logarithm would not be exact."""
    values = values if values.dtype in (torch.float32, torch.float64) else values.float()
    mantissa, exponent = torch.frexp(values[torch.isfinite(values)])
    exponent = exponent - (mantissa == -0.5).to(exponent.dtype)
    distance = (exponent - LOWEST).clamp(0, _SIDE) * (mantissa != 0)
    return torch.bincount(torch.where(mantissa < 0, _SIDE - distance, _SIDE + distance), minlength=2 * _SIDE + 1)
