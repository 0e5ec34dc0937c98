"""The sums of a gradient and the statistics that follow from them; histograms, where they are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.records import Histogram

SUM, SQUARES, MIN, MAX, ZEROS, NAN, POSINF, NEGINF = range(8)
WIDTH: Final = 8
_LARGEST_POWER: Final = 400
SMALLEST_FACTOR: Final = 2.0**-100
"""The smallest factor that keeps its digits as a float32."""
SMALLEST_SQUARES: Final = 1e-280
"""The smallest sum of squares that has surely not lost precision by underflow."""
Rows = NDArray[np.float64]


class Moments:
    """Sums over the gradients of one step: a row for each tensor, for each group, and for all of them.

    A row holds the sum, the sum of squares, the minimum and the maximum over finite elements, and the numbers of zeros,
    NaN, +Inf and -Inf. With an exponent e the first four are those of the gradients divided by 2**e, for float64
    gradients whose squares leave the range of a float64.
    """

    __slots__ = ("exponent", "finite", "group_rows", "has_ends", "may_hide", "norm", "rows", "total")

    def __init__(
        self,
        rows: Rows,
        group_rows: Rows,
        total: list[float],
        exponent: int = 0,
        *,
        has_ends: bool = True,
        may_hide: bool = True,
    ) -> None:
        self.rows = rows
        self.group_rows = group_rows
        self.total = total
        self.exponent = exponent
        self.finite = not (total[NAN] or total[POSINF] or total[NEGINF])
        """Whether every element is finite."""
        plain = self.finite and not exponent
        self.norm = math.sqrt(total[SQUARES]) if plain else true_norm(total, exponent)
        """The true L2 norm of all gradients: NaN or Inf where an element is."""
        self.has_ends = has_ends
        """Whether the smallest and largest elements are known; between reports ranks do not exchange them."""
        self.may_hide = may_hide
        """Whether a mean may hide a variance, see `find_deviations`."""

    def of(self, kept: NDArray[np.int64]) -> Moments:
        """Return the same sums with the rows of these tensors only; the other tensors have no elements."""
        return Moments(self.rows[kept], self.group_rows, self.total, self.exponent, has_ends=self.has_ends)

    @property
    def nonfinite_count(self) -> int:
        """Return the number of elements that are NaN or infinite."""
        return int(self.total[NAN] + self.total[POSINF] + self.total[NEGINF])

    def nonfinite_rows(self) -> list[int]:
        """Return the indices of the tensors that have a non-finite element."""
        return [int(index) for index in np.flatnonzero(self.rows[:, NAN:].sum(axis=1))]

    def out_of_range(self) -> bool:
        """Whether the squares have overflowed, or underflowed so far that they lost precision."""
        if SMALLEST_SQUARES < self.total[SQUARES] < math.inf:
            return False
        low, high = self.total[MIN], self.total[MAX]
        return low <= high and max(abs(low), abs(high)) > 0


def replaced(moments: Moments, nan: Rows, infinity: Rows, group_of: NDArray[np.int64], num_groups: int) -> Moments:
    """Return the sums after NaN and Inf are replaced by these values of each tensor, computed from their counts."""
    rows, exponent = moments.rows.copy(), moments.exponent
    kinds = ((NAN, nan), (POSINF, infinity), (NEGINF, -infinity))
    largest = max(float(abs(values[rows[:, kind] > 0]).max(initial=0.0)) for kind, values in kinds)
    power = math.frexp(largest)[1] - exponent
    if largest and power > _LARGEST_POWER:
        exponent += power
        for column in (SUM, SQUARES, SQUARES, MIN, MAX):
            rows[:, column] = np.ldexp(rows[:, column], -power)
    for kind, values in kinds:
        counts, scaled = rows[:, kind].copy(), np.ldexp(values, -exponent)
        rows[:, SUM] += counts * scaled
        rows[:, SQUARES] += counts * scaled * scaled
        rows[:, ZEROS] += counts * (values == 0)
        rows[:, kind] = 0.0
        if moments.has_ends:
            there = counts > 0
            rows[there, MIN] = np.minimum(rows[there, MIN], scaled[there])
            rows[there, MAX] = np.maximum(rows[there, MAX], scaled[there])
    return Moments(rows, *merge(rows, group_of, num_groups), exponent, has_ends=moments.has_ends)


def empty_row() -> list[float]:
    """Return the row of no elements at all."""
    return [0.0, 0.0, math.inf, -math.inf, 0.0, 0.0, 0.0, 0.0]


def merge(rows: Rows, group_of: NDArray[np.int64], num_groups: int) -> tuple[Rows, list[float]]:
    """Merge the rows of tensors into the rows of their groups and of everything."""
    groups = np.tile(np.array(empty_row()), (num_groups, 1))
    np.add.at(groups[:, : SQUARES + 1], group_of, rows[:, : SQUARES + 1])
    np.minimum.at(groups[:, MIN], group_of, rows[:, MIN])
    np.maximum.at(groups[:, MAX], group_of, rows[:, MAX])
    np.add.at(groups[:, ZEROS:], group_of, rows[:, ZEROS:])
    total = empty_row()
    if num_groups:
        total = groups.sum(axis=0).tolist()
        total[MIN], total[MAX] = float(groups[:, MIN].min()), float(groups[:, MAX].max())
    return groups, total


def finite_norm(row: Sequence[float], exponent: int = 0) -> float:
    """Return the L2 norm over the finite elements of a row."""
    return _scaled(math.sqrt(row[SQUARES]), exponent)


def true_norm(row: Sequence[float], exponent: int = 0) -> float:
    """Return the L2 norm of a row, NaN or Inf where an element is."""
    if row[NAN]:
        return math.nan
    return math.inf if row[POSINF] or row[NEGINF] else finite_norm(row, exponent)


def log_norm(norm: float) -> float:
    """Return ln of a norm: -inf for a norm of zero, NaN for one that is not finite."""
    if not math.isfinite(norm):
        return math.nan
    return math.log(norm) if norm > 0 else -math.inf


def describe_whole(
    row: Sequence[float],
    count: int,
    missing: Sequence[str],
    exponent: int = 0,
    *,
    squared_deviations: float | None = None,
) -> dict[str, Any]:
    """Return the fields of a `GradientStatistics`, from the row of everything."""
    found = describe(row, count, exponent, squared_deviations=squared_deviations)
    found["total_norm"], found["std"] = found.pop("norm"), found["variance"] ** 0.5
    found["missing"] = missing
    return found


def describe(
    row: Sequence[float], count: int, exponent: int = 0, *, squared_deviations: float | None = None
) -> dict[str, Any]:
    """Return the statistics of a row of this many elements, over the finite ones.

    Pass the sum of the squared deviations from their mean if it is known more exactly than from the row.
    """
    _, _, low, high, zeros, nan, positive, negative = row
    norm, variance, mean = spread(row, count, exponent, squared_deviations=squared_deviations)
    if not low <= high:
        low = high = math.nan
    return {
        "norm": norm,
        "mean": mean,
        "variance": variance,
        "min": _scaled(low, exponent),
        "max": _scaled(high, exponent),
        "zero_fraction": zeros / count if count else 0.0,
        "element_count": count,
        "nan_count": int(nan),
        "inf_count": int(positive + negative),
    }


def spread(
    row: Sequence[float], count: int, exponent: int = 0, *, squared_deviations: float | None = None
) -> tuple[float, float, float]:
    """Return norm, variance and mean over the finite elements of a row of this many elements, see `describe`."""
    total, squares, _, _, _, nan, positive, negative = row
    finite = count - int(nan) - int(positive + negative)
    norm, variance, mean = math.sqrt(squares), 0.0, total / finite if finite else math.nan
    if finite > 1:
        if squared_deviations is None:
            squared_deviations = max(0.0, squares - total * total / finite)
        variance = squared_deviations / (finite - 1)
    if exponent:
        return _scaled(norm, exponent), _scaled(variance, 2 * exponent), _scaled(mean, exponent)
    return norm, variance, mean


def _scaled(value: float, exponent: int) -> float:
    if not exponent:
        return value
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(math.inf, value)


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
