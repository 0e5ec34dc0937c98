"""The merge of what every rank has measured of its shards: at most two collectives, and the same numbers everywhere."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import nn

from gradtrack.errors import UsageError
from gradtrack.measure.moments import MAX, MIN, NAN, POSINF, SQUARES, SUM, WIDTH, ZEROS, Rows, empty_row, in_range
from gradtrack.measure.shards import is_distributed, local_part, num_shards, widest_mesh
from gradtrack.measure.spread import Spread

_SUMMED: Final = (SUM, SQUARES, ZEROS, NAN, POSINF, POSINF + 1)
_NONFINITE: Final = slice(_SUMMED.index(NAN), len(_SUMMED))
_PRESENT, _EXTRA, _COUNT = range(len(_SUMMED), len(_SUMMED) + 3)
_groups: dict[tuple[int, ...], Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank brings to a merge: rows and element counts of the parameters that have a gradient there, and more.

    `ends` asks for the smallest and largest elements and `spread` for the differences between ranks, which only come
    with them. Both are the same on every rank, or the ranks would wait for each other.
    """

    rows: Rows
    present: NDArray[np.int64]
    counts: NDArray[np.int64]
    extra: NDArray[np.float64]
    loss: float | None = None
    ends: bool = True
    spread: bool = False
    exponent: int = 0


class Merged(NamedTuple):
    """What all ranks together have, for each parameter and for all of them."""

    rows: Rows
    present: NDArray[np.bool_]
    extra: NDArray[np.float64]
    counts: NDArray[np.int64] | None
    """The numbers of elements, where those of a parameter cannot tell."""
    loss: float | None
    spread: dict[str, Any] | None
    has_ends: bool


class Ranks:
    """The ranks that share the parameters of a model, and how often each element of a parameter is there among them.

    What is sent has a place for every parameter, whatever a rank has of it, so that no rank waits for another in vain:
    one sum of eight float64 numbers for each parameter and two for the loss, and where the ends are asked for, or
    cannot be done without, one maximum of two for each parameter. An explicit group without a DTensor among the
    parameters says that plain tensors are shards, which takes a ninth number, but for `replicas`, known by their ids.
    """

    def __init__(self, params: Sequence[nn.Parameter], group: Any = None, *, replicas: Container[int] = ()) -> None:
        self._own_group, meshes = group, [param.device_mesh for param in params if is_distributed(param)]  # type: ignore[attr-defined]
        self._mesh = mesh = widest_mesh(meshes) if meshes else None
        self._device = torch.device(mesh.device_type) if mesh is not None else local_part(params[0]).device
        if group is not None:
            self._ranks = tuple(torch.distributed.get_process_group_ranks(group))
            _check_group(self._ranks, meshes)
        else:
            self._ranks = tuple(sorted(mesh.mesh.flatten().tolist()))  # type: ignore[union-attr]
        plain = [mesh is None and id(param) not in replicas for param in params]
        shards = [
            len(self._ranks) if is_shard else num_shards(one) for one, is_shard in zip(params, plain, strict=True)
        ]
        self._plain_shards = any(plain)
        self._shards = np.array(shards, dtype=np.float64)

    @property
    def sharded(self) -> NDArray[np.bool_]:
        """Say which parameters a rank holds only parts of."""
        found: NDArray[np.bool_] = self._shards > 1
        return found

    def total(self, counts: Rows, positions: NDArray[np.int64], group_of: NDArray[np.int64], num_groups: int) -> Rows:
        """Add up what every rank has counted of the parameters at these positions, by group and each element once."""
        groups = np.zeros((num_groups, counts.shape[1]))
        np.add.at(groups, group_of, counts * (self._shards[positions] / len(self._ranks))[:, None])
        return np.rint(self._reduce(groups.ravel(), torch.distributed.ReduceOp.SUM).reshape(groups.shape))

    def merge(self, share: Share) -> Merged:
        """Merge what this rank has measured with what all others have."""
        sums, loss, more = self._add_up(share)
        # Nobody can do without the ends where the sums do not tell how large the elements are, or that they are finite.
        clean = sums[:, _NONFINITE].sum() == 0 and in_range(float(sums[:, SQUARES].sum()))
        wanted = share.ends or not clean
        highs, tail = self._find_ends(share) if wanted else (np.full((len(sums), 2), -math.inf), None)
        spread = Spread.read(more, tail, len(self._ranks)) if share.spread and tail is not None else None
        copies = len(self._ranks) / self._shards
        there = np.where(self._shards == 1, np.maximum(sums[:, _PRESENT], 1.0), copies)
        rows = _count_once(sums, highs, there)
        counts = np.rint(sums[:, _COUNT] / there).astype(np.int64) if self._plain_shards else None
        mean = float(loss[0] / loss[1]) if loss[1] else None
        return Merged(rows, sums[:, _PRESENT] > 0, sums[:, _EXTRA] / copies, counts, mean, spread, wanted)

    def _add_up(self, share: Share) -> tuple[Rows, NDArray[np.float64], NDArray[np.float64]]:
        """Return the sums over all ranks: those of the parameters, of the loss, and of what tells of their spread."""
        sums = np.zeros((len(self._shards), _COUNT + self._plain_shards))
        sums[share.present, : len(_SUMMED)] = share.rows[:, _SUMMED]
        sums[share.present, _PRESENT] = 1.0
        sums[:, _EXTRA] = share.extra
        if self._plain_shards:
            sums[share.present, _COUNT] = share.counts
        loss = [0.0 if share.loss is None else share.loss, float(share.loss is not None)]
        tail = Spread.sums(share.rows, share.exponent) if share.spread else []
        found = self._reduce(np.concatenate([sums.ravel(), loss, tail]), torch.distributed.ReduceOp.SUM)
        size = sums.size
        return found[:size].reshape(sums.shape), found[size : size + 2], found[size + 2 :]

    def _find_ends(self, share: Share) -> tuple[Rows, NDArray[np.float64]]:
        """Return the negated smallest and the largest elements over all ranks, and what tells of their spread."""
        ends = np.full((len(self._shards), 2), -math.inf)
        ends[share.present, 0], ends[share.present, 1] = -share.rows[:, MIN], share.rows[:, MAX]
        tail = Spread.highs(share.rows, share.exponent) if share.spread else []
        found = self._reduce(np.concatenate([ends.ravel(), tail]), torch.distributed.ReduceOp.MAX)
        return found[: ends.size].reshape(ends.shape), found[ends.size :]

    def _reduce(self, values: NDArray[np.float64], operation: Any) -> NDArray[np.float64]:
        tensor = torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
        torch.distributed.all_reduce(tensor, op=operation, group=self._group())
        return tensor.cpu().numpy()

    def _group(self) -> Any:
        """Return the process group of all ranks of the mesh; one that torch has not made yet is made once."""
        if self._own_group is not None or self._mesh is None:
            return self._own_group
        if self._mesh.ndim == 1:
            return self._mesh.get_group()
        if len(self._ranks) == torch.distributed.get_world_size():
            return torch.distributed.group.WORLD
        if self._ranks not in _groups:
            group = torch.distributed.new_group(list(self._ranks), use_local_synchronization=True)
            _groups[self._ranks] = group
        return _groups[self._ranks]


def _count_once(sums: Rows, ends: Rows, there: NDArray[np.float64]) -> Rows:
    """Count every element once, however many ranks have sent it."""
    rows = np.tile(np.array(empty_row()), (len(sums), 1))
    rows[:, _SUMMED] = sums[:, : len(_SUMMED)] / there[:, None]
    # Replicas that disagree about an element leave a part of it, which must not vanish.
    rows[:, ZEROS:WIDTH] = np.ceil(rows[:, ZEROS:WIDTH])
    rows[:, MIN], rows[:, MAX] = -ends[:, 0], ends[:, 1]
    return rows


def _check_group(ranks: Sequence[int], meshes: Sequence[Any]) -> None:
    """Refuse a group that leaves out ranks which share the parameters."""
    for mesh in dict.fromkeys(meshes):
        if not set(ranks).issuperset(mesh.mesh.flatten().tolist()):
            raise UsageError(
                f"process_group of the ranks {list(ranks)} and parameters on the mesh {mesh}: expected a group with "
                "all ranks of the mesh. Leave process_group out, since DTensors know their own."
            )
