"""How much the norms of the single ranks differ, from a sum and a maximum over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import torch.distributed
from numpy.typing import NDArray

from gradtrack.measure.moments import NAN, Rows, finite_norm

_RANK_BITS: Final = 20
_LARGEST: Final = float(np.finfo(np.float64).max)


@final
class Spread:
    """The smallest, the largest and the mean of the norms that the ranks have, and which ranks have the ends.

    A maximum of floats does not tell who has it, so the last 20 bits of a norm carry the rank; what is left of it is
    right to 2e-10. Three numbers go to the sum and three to the maximum, however many ranks there are.
    """

    @staticmethod
    def sums(rows: Rows, exponent: int) -> list[float]:
        """Return what goes to the sum: the norm of this rank, its square, and whether anything is not finite."""
        norm = _norm(rows, exponent)
        return [norm, norm * norm, float(_has_nonfinite(rows))]

    @staticmethod
    def highs(rows: Rows, exponent: int) -> list[float]:
        """Return what goes to the maximum: the ends with their rank, and the first rank with anything not finite."""
        rank, norm = torch.distributed.get_rank(), _norm(rows, exponent)
        marked = _mark(norm, rank)
        return [-marked, marked, -float(rank) if _has_nonfinite(rows) else -math.inf]

    @staticmethod
    def read(sums: NDArray[np.float64], highs: NDArray[np.float64], num_ranks: int) -> dict[str, Any]:
        """Return the fields of a `RankStatistics`."""
        mean = float(sums[0]) / num_ranks
        (low, low_rank), (high, high_rank) = _unmark(-float(highs[0])), _unmark(float(highs[1]))
        variance = max(0.0, float(sums[1]) / num_ranks - mean * mean) if high > low else 0.0
        return {
            "num_ranks": num_ranks,
            "norm_min": low,
            "norm_min_rank": low_rank,
            "norm_max": high,
            "norm_max_rank": high_rank,
            "norm_mean": mean,
            "norm_std": math.sqrt(variance),
            "nonfinite_ranks": int(sums[2]),
            "first_nonfinite_rank": None if math.isinf(highs[2]) else -int(highs[2]),
        }


def _norm(rows: Rows, exponent: int) -> float:
    """Return the norm over the finite elements of this rank."""
    row: Sequence[float] = rows.sum(axis=0).tolist() if len(rows) else [0.0] * rows.shape[1]
    return min(finite_norm(row, exponent), _LARGEST)


def _has_nonfinite(rows: Rows) -> bool:
    return bool(rows[:, NAN:].any())


def _mark(norm: float, rank: int) -> float:
    bits = np.array(norm).view(np.int64) >> _RANK_BITS << _RANK_BITS
    return float((bits | rank).view(np.float64))


def _unmark(marked: float) -> tuple[float, int]:
    bits = np.array(marked).view(np.int64)
    norm = bits >> _RANK_BITS << _RANK_BITS
    return float(norm.view(np.float64)), int(bits - norm)
