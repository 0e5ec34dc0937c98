"""The all-reduce of measured sums: two numbers for a float64, and how norms differ between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.errors import UsageError
from gradtrack.gradients.distributed.shards import is_distributed, local_part, num_shards, widest_mesh
from gradtrack.gradients.moments import MAX, MIN, NAN, POSINF, SQUARES, SUM, WIDTH, ZEROS, Rows, empty_row, finite_norm
from gradtrack.gradients.variance import CentredSums, Floats, centres_between, take_back

_BORDER: Final = 48
_LOW: Final = 945
_HIGH: Final = -1070
_HEADROOM: Final = 64
_SAFE: Final = 900
"""Powers of two: squares up to the border are multiplied by one, those above it by another, so that neither leaves the
range when those of many ranks are added; the sums are divided by the headroom for the same reason."""


def is_wide(param: nn.Parameter) -> bool:
    """Say whether the squares of a gradient can leave the range of a float64."""
    kinds = (param.dtype, getattr(param, "grad_dtype", param.dtype))  # the second is None where any will do
    return not {torch.float64, torch.complex128, None}.isdisjoint(kinds)


def split(rows: Rows, exponent: int) -> tuple[Rows, Rows]:
    """Return rows with the squares up to the border, and those above it; `exponent` is that of the rows."""
    mantissas, powers = np.frexp(rows[:, SQUARES])
    powers = powers + 2 * exponent
    is_high, found = powers > _BORDER, rows.copy()
    found[:, SUM] = np.ldexp(rows[:, SUM], exponent - _HEADROOM)
    found[:, SQUARES] = np.where(is_high, 0.0, np.ldexp(mantissas, np.minimum(powers, _BORDER) + _LOW))
    return found, np.where(is_high, np.ldexp(mantissas, powers + _HIGH), 0.0)[:, None]


def join(rows: Rows, high: NDArray[np.float64], largest: float = 0.0) -> int:
    """Put squares together again that were split, in place; return the exponent of the rows from then on.

    With it the squares of `largest` are in the range as well.
    """
    low = rows[:, SQUARES]
    powers = [int(np.frexp(part.sum())[1]) - moved for part, moved in ((low, _LOW), (high, _HIGH)) if part.any()]
    power = max(powers + [2 * math.frexp(largest)[1]] * (largest > 0), default=0)
    exponent = 0 if abs(power) < _SAFE else power // 2
    rows[:, SQUARES] = np.ldexp(low, -_LOW - 2 * exponent) + np.ldexp(high, -_HIGH - 2 * exponent)
    rows[:, SUM] = np.ldexp(rows[:, SUM], _HEADROOM - exponent)
    for end in (MIN, MAX):
        rows[:, end] = np.ldexp(rows[:, end], -exponent)
    return exponent


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
        """Return this rank's numbers for the sum: its norm, the square of it, and whether an element is not finite."""
        norm = _norm(rows, exponent)
        return [norm, norm * norm, float(rows[:, NAN:].any())]

    @staticmethod
    def highs(rows: Rows, exponent: int) -> list[float]:
        """Return this rank's numbers for the maximum: the ends with the rank, and the rank if one is not finite."""
        rank, norm = torch.distributed.get_rank(), _norm(rows, exponent)
        marked = _mark(norm, rank)
        return [-marked, marked, -float(rank) if rows[:, NAN:].any() else -math.inf]

    @staticmethod
    def on_device(squares: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        """Return both from the sum of squares of this rank, and whether an element is not finite, on their device."""
        rank, norm = torch.distributed.get_rank(), squares.sqrt()
        marked = (norm.view(torch.int64) >> _RANK_BITS << _RANK_BITS | rank).view(torch.float64)
        first = torch.where(bad, -float(rank), -math.inf).to(norm)
        return torch.stack([norm, squares, bad.to(norm)]), torch.stack([-marked, marked, first])

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


def _mark(norm: float, rank: int) -> float:
    bits = np.array(norm).view(np.int64) >> _RANK_BITS << _RANK_BITS
    return float((bits | rank).view(np.float64))


def _unmark(marked: float) -> tuple[float, int]:
    bits = np.array(marked).view(np.int64)
    norm = bits >> _RANK_BITS << _RANK_BITS
    return float(norm.view(np.float64)), int(bits - norm)


SUMMED: Final = (SUM, SQUARES, ZEROS, NAN, POSINF, POSINF + 1)
NONFINITE: Final = slice(SUMMED.index(NAN), len(SUMMED))
PRESENT, _EXTRA, _MORE = range(len(SUMMED), len(SUMMED) + 3)
_groups: dict[tuple[int, ...], Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank brings to a merge: rows and element counts of the parameters that have a gradient there, and more.

    `around` returns their sums and sums of squares about given centres, and `sizes` are the element counts of all
    parameters, whole. `limited` has for each of them what an elementwise clipping would limit and the sum of squares
    that it would leave, `tallies` are counts to be added up, and `more` other numbers. `ends` asks for the smallest and
    largest elements, `ends_if_nonfinite` only where any element is not finite, `centred` for sums about the middle
    between them, and `spread` for the differences between ranks, which come with them. All ranks must set the same
    fields and ask for the same results, or they would wait for each other.
    """

    rows: Rows
    present: NDArray[np.int64]
    counts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    around: Callable[[Floats], Floats]
    extra: NDArray[np.float64]
    limited: NDArray[np.float64] | None = None
    tallies: NDArray[np.float64] | None = None
    more: Sequence[float] = ()
    loss: float | None = None
    ends: bool = True
    ends_if_nonfinite: bool = False
    centred: bool = True
    spread: bool = False
    exponent: int = 0


class MergedSums(NamedTuple):
    """The merged sums of all ranks, for each parameter and for all of them."""

    rows: Rows
    exponent: int
    present: NDArray[np.bool_]
    extra: NDArray[np.float64]
    counts: NDArray[np.int64] | None
    """The numbers of elements, where those of a parameter cannot tell."""
    limited: NDArray[np.float64] | None
    tallies: NDArray[np.float64]
    more: list[float]
    loss: float | None
    spread: dict[str, Any] | None
    has_ends: bool
    centred: CentredSums | None
    """The sums about centres, if a mean might hide a variance."""


class Ranks:
    """The ranks that share the parameters of a model, and how often each element of a parameter is there among them.

    What is sent has a place for every parameter, whatever a rank has of it, so that no rank waits for another in vain:
    one sum of eight float64 numbers for each parameter and two for the loss, and where the ends are asked for one
    maximum of two for each parameter. That comes first, since what lies between the ends has a centre that every rank
    knows then: sums about it tell a variance that the mean would hide. An explicit group without a DTensor among the
    parameters says that plain tensors are shards, which takes a number more, but for `replicas`, known by their ids. So
    do parameters of float64, since the squares of what two ranks have may not fit into one number.
    """

    def __init__(self, params: Sequence[nn.Parameter], group: Any = None, *, replicas: Container[int] = ()) -> None:
        self._own_group, meshes = group, [param.device_mesh for param in params if is_distributed(param)]  # type: ignore[attr-defined]
        self._mesh = mesh = widest_mesh(meshes) if meshes else None
        self._device = torch.device(mesh.device_type) if mesh is not None else local_part(params[0]).device
        if group is not None:
            self.members: tuple[int, ...] = tuple(torch.distributed.get_process_group_ranks(group))
            _check_group(self.members, meshes)
        else:
            self.members = tuple(sorted(mesh.mesh.flatten().tolist()))  # type: ignore[union-attr]
        plain = [mesh is None and id(param) not in replicas for param in params]
        shards = [
            len(self.members) if is_shard else num_shards(one) for one, is_shard in zip(params, plain, strict=True)
        ]
        self.has_plain_shards = any(plain)
        """Whether plain tensors are shards, whose sizes the ranks have to tell each other."""
        self.is_wide = any(map(is_wide, params))
        """Whether the squares of a gradient can leave the range of a float64."""
        self.shards = np.array(shards, dtype=np.float64)
        """Into how many parts each parameter is cut."""
        self.device_constants: Any = None
        """What an accelerator knows of the gradients that this rank has, see `device_sums`."""
        self.sharded: NDArray[np.bool_] = self.shards > 1
        """Which parameters a rank holds only parts of."""

    def once(self, counts: Rows, positions: NDArray[np.int64]) -> Rows:
        """Weigh what this rank has counted of the parameters at these positions so that a sum has each element once."""
        found: Rows = counts * (self.shards[positions] / len(self.members))[:, None]
        return found

    def counts_as(self) -> list[float]:
        """Return for each parameter how often a sum over the ranks has to count what this rank holds of it."""
        found: list[float] = (self.shards / len(self.members)).tolist()
        return found

    @property
    def bytes_of_each(self) -> int:
        """Return how many bytes a rank gives to a report for each parameter, whatever the settings."""
        return 80 + 8 * self.is_wide + 8 * self.has_plain_shards

    def merge(self, share: Share) -> MergedSums:
        """Merge the sums that this rank has measured with those of all others."""
        ends = self._find_ends(share) if share.ends else None
        centres = np.zeros(len(self.shards))
        if ends is not None and share.centred:
            centres = centres_between(*self._lows_and_highs(ends))
        sums = self._add_up(share, centres)
        limited, num_more = share.limited is not None, len(share.more)
        if ends is None and share.ends_if_nonfinite:
            rows = sums[: self.num_sums(limited=limited)].reshape(len(self.shards), -1)
            ends = self._find_ends(share) if bool(rows[:, NONFINITE].any()) else None
        return self.read(sums, ends, share.sizes, centres, spread=share.spread, limited=limited, num_more=num_more)

    def num_sums(self, *, limited: bool = False) -> int:
        """Return how many numbers of the sum are those of the parameters, which come first."""
        return len(self.shards) * (_MORE + self.is_wide + self.has_plain_shards + 2 * limited)

    def read(
        self,
        sums: NDArray[np.float64],
        ends: NDArray[np.float64] | None,
        sizes: NDArray[np.int64],
        centres: Floats | None = None,
        *,
        spread: bool = False,
        limited: bool = False,
        num_more: int = 0,
    ) -> MergedSums:
        """Return what the numbers say that the ranks have added up, and the greatest of those of the ends.

        `sizes` are the element counts of all parameters, whole. Sums are about `centres`.
        """
        size = self.num_sums(limited=limited)
        sums, loss, more = sums[:size].reshape(len(self.shards), -1), sums[size : size + 2], sums[size + 2 :]
        copies = len(self.members) / self.shards
        there = np.where(self.shards == 1, np.maximum(sums[:, PRESENT], 1.0), copies)
        rows = _count_once(sums, there)
        apart = None
        if ends is not None:
            (rows[:, MIN], rows[:, MAX]), apart = self._lows_and_highs(ends), ends[2 * len(self.shards) :]
        largest = 0.0 if centres is None else float(abs(centres).max())
        exponent = join(rows, sums[:, _MORE] / there, largest) if self.is_wide else 0
        rest = sums[:, _MORE + self.is_wide :] / there[:, None]
        counts = np.rint(rest[:, 0]).astype(np.int64) if self.has_plain_shards else None
        finite = (sizes if counts is None else counts) - rows[:, NAN:].sum(axis=1)
        centred = None
        if centres is not None and centres.any():
            centred = take_back(rows, np.ldexp(centres, -exponent), finite)
        tail = more[3 * spread :]
        return MergedSums(
            rows,
            exponent,
            present=sums[:, PRESENT] > 0,
            extra=sums[:, _EXTRA] / copies,
            counts=counts,
            limited=rest[:, self.has_plain_shards :] if limited else None,
            tallies=np.rint(tail[: len(tail) - num_more]),
            more=tail[len(tail) - num_more :].tolist(),
            loss=float(loss[0] / loss[1]) if loss[1] else None,
            spread=Spread.read(more, apart, len(self.members)) if spread and apart is not None else None,
            has_ends=ends is not None,
            centred=centred,
        )

    def norms(self, norms: NDArray[np.float64], order: float) -> NDArray[np.float64]:
        """Return norms of an order over all ranks, from those of what this rank counts as; each is a set of its own."""
        largest = self._reduce(norms.copy(), torch.distributed.ReduceOp.MAX)
        if math.isinf(order):
            return largest
        parts = np.divide(norms, largest, out=np.zeros_like(norms), where=largest > 0)
        return largest * self._reduce(parts**order, torch.distributed.ReduceOp.SUM) ** (1.0 / order)

    def _lows_and_highs(self, ends: NDArray[np.float64]) -> tuple[Floats, Floats]:
        """Return the smallest and the largest elements of the parameters."""
        highs = ends[: 2 * len(self.shards)].reshape(-1, 2)
        return -highs[:, 0], highs[:, 1]

    def _add_up(self, share: Share, centres: Floats) -> NDArray[np.float64]:
        """Return the sums over all ranks: those of the parameters, of the loss, and of what is not by parameter."""
        rows = share.rows.copy()
        if centres.any():
            rows[:, [SUM, SQUARES]] = share.around(centres[share.present])
        columns = [rows[:, SUMMED], np.ones((len(share.rows), 1)), share.extra[share.present, None]]
        if self.is_wide:
            columns[0], high = split(columns[0], share.exponent)
            columns.append(high)
        if self.has_plain_shards:
            columns.append(share.counts[:, None].astype(np.float64))
        if share.limited is not None:
            columns.append(share.limited)
        found = np.concatenate(columns, axis=1)
        sums = np.zeros((len(self.shards), found.shape[1]))
        sums[:, _EXTRA] = share.extra  # of parameters without a gradient, too
        sums[share.present] = found
        loss = [0.0 if share.loss is None else share.loss, float(share.loss is not None)]
        tail = Spread.sums(share.rows, share.exponent) if share.spread else []
        tallies = np.zeros(0) if share.tallies is None else share.tallies.ravel()
        numbers = np.concatenate([sums.ravel(), loss, tail, tallies, share.more])
        return self._reduce(numbers, torch.distributed.ReduceOp.SUM)

    def _find_ends(self, share: Share) -> NDArray[np.float64]:
        """Return the negated smallest and the largest elements over all ranks, and what tells of their spread."""
        ends = np.full((len(self.shards), 2), -math.inf)
        ends[share.present, 0] = -np.ldexp(share.rows[:, MIN], share.exponent)
        ends[share.present, 1] = np.ldexp(share.rows[:, MAX], share.exponent)
        tail = Spread.highs(share.rows, share.exponent) if share.spread else []
        return self._reduce(np.concatenate([ends.ravel(), tail]), torch.distributed.ReduceOp.MAX)

    def _reduce(self, values: NDArray[np.float64], operation: Any) -> NDArray[np.float64]:
        tensor = torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
        return self.reduce(tensor, operation).cpu().numpy()

    def reduce(self, numbers: Tensor, operation: Any) -> Tensor:
        """Return numbers that all ranks have reduced in place, on their device."""
        torch.distributed.all_reduce(numbers, op=operation, group=self._group())
        return numbers

    def _group(self) -> Any:
        """Return the process group of all ranks of the mesh; one that torch has not made yet is made once."""
        if self._own_group is not None or self._mesh is None:
            return self._own_group
        if self._mesh.ndim == 1:
            return self._mesh.get_group()
        if len(self.members) == torch.distributed.get_world_size():
            return torch.distributed.group.WORLD
        if self.members not in _groups:
            group = torch.distributed.new_group(list(self.members), use_local_synchronization=True)
            _groups[self.members] = group
        return _groups[self.members]


def _count_once(sums: Rows, there: NDArray[np.float64]) -> Rows:
    """Count every element once, however many ranks have sent it."""
    rows = np.tile(np.array(empty_row()), (len(sums), 1))
    rows[:, SUMMED] = sums[:, : len(SUMMED)] / there[:, None]
    # Replicas that disagree about an element leave a part of it, which must not vanish.
    rows[:, ZEROS:WIDTH] = np.ceil(rows[:, ZEROS:WIDTH])
    return rows


def _check_group(ranks: Sequence[int], meshes: Sequence[Any]) -> None:
    """Refuse a group that leaves out ranks which share the parameters."""
    for mesh in dict.fromkeys(meshes):
        if not set(ranks).issuperset(mesh.mesh.flatten().tolist()):
            raise UsageError(
                f"process_group of the ranks {list(ranks)} and parameters on the mesh {mesh}: expected a group with "
                "all ranks of the mesh. Leave process_group out, since DTensors know their own."
            )
