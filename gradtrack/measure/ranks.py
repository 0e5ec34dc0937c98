"""The merge of what every rank has measured of its shards: two collectives a step, and the same numbers everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.errors import UsageError
from gradtrack.measure.moments import MAX, MIN, NAN, POSINF, SQUARES, SUM, WIDTH, ZEROS, Rows, empty_row

_SUMMED: Final = (SUM, SQUARES, ZEROS, NAN, POSINF, POSINF + 1)
_PRESENT, _EXTRA = len(_SUMMED), len(_SUMMED) + 1
_groups: dict[tuple[int, ...], Any] = {}


class Merged(NamedTuple):
    """What all ranks together have: a row and an extra number for each parameter, who has a gradient, the mean loss."""

    rows: Rows
    present: NDArray[np.bool_]
    extra: NDArray[np.float64]
    loss: float | None


class Ranks:
    """The ranks that share the parameters of a model, and how often each element of a parameter is there among them.

    What is sent has a place for every parameter, whatever a rank has of it, so that no rank waits for another in vain:
    ten float64 numbers for each parameter, and two for the loss.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        mesh = _widest(param.device_mesh for param in params if is_distributed(param))  # type: ignore[attr-defined]
        self._ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        self._mesh, self._device = mesh, torch.device(mesh.device_type)
        self._shards = np.array([_num_shards(param) for param in params], dtype=np.float64)

    def merge(self, rows: Rows, present: NDArray[np.int64], extra: NDArray[np.float64], loss: float | None) -> Merged:
        """Merge the rows of the parameters that have a gradient here, and a number and a loss, over all ranks."""
        count, world = len(self._shards), len(self._ranks)
        sums = np.zeros((count, _EXTRA + 1))
        sums[present, : len(_SUMMED)] = rows[:, _SUMMED]
        sums[present, _PRESENT] = 1.0
        sums[:, _EXTRA] = extra
        ends = np.full((count, 2), -math.inf)
        ends[present, 0], ends[present, 1] = -rows[:, MIN], rows[:, MAX]
        tail = [0.0 if loss is None else loss, float(loss is not None)]
        found = self._reduce(np.concatenate([sums.ravel(), tail]), torch.distributed.ReduceOp.SUM)
        highs = self._reduce(ends.ravel(), torch.distributed.ReduceOp.MAX).reshape(count, 2)
        return self._unpack(found[:-2].reshape(count, -1), highs, found[-2:], world)

    def total(self, counts: Rows, positions: NDArray[np.int64], group_of: NDArray[np.int64], num_groups: int) -> Rows:
        """Add up what every rank has counted of the parameters at these positions, by group and each element once."""
        groups = np.zeros((num_groups, counts.shape[1]))
        np.add.at(groups, group_of, counts * (self._shards[positions] / len(self._ranks))[:, None])
        return np.rint(self._reduce(groups.ravel(), torch.distributed.ReduceOp.SUM).reshape(groups.shape))

    def _unpack(self, sums: Rows, ends: Rows, loss: NDArray[np.float64], world: int) -> Merged:
        """Count every element once, however many ranks have sent it."""
        copies = world / self._shards
        there = np.where(self._shards == 1, np.maximum(sums[:, _PRESENT], 1.0), copies)
        rows = np.tile(np.array(empty_row()), (len(sums), 1))
        rows[:, _SUMMED] = sums[:, : len(_SUMMED)] / there[:, None]
        # Replicas that disagree about an element leave a part of it, which must not vanish.
        rows[:, ZEROS:WIDTH] = np.ceil(rows[:, ZEROS:WIDTH])
        rows[:, MIN], rows[:, MAX] = -ends[:, 0], ends[:, 1]
        mean = float(loss[0] / loss[1]) if loss[1] else None
        return Merged(rows, sums[:, _PRESENT] > 0, sums[:, _EXTRA] / copies, mean)

    def _reduce(self, values: NDArray[np.float64], operation: Any) -> NDArray[np.float64]:
        tensor = torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
        torch.distributed.all_reduce(tensor, op=operation, group=self._group())
        return tensor.cpu().numpy()

    def _group(self) -> Any:
        """Return the process group of all ranks of the mesh; one that torch has not made yet is made once."""
        if self._mesh.ndim == 1:
            return self._mesh.get_group()
        if len(self._ranks) == torch.distributed.get_world_size():
            return torch.distributed.group.WORLD
        if self._ranks not in _groups:
            group = torch.distributed.new_group(list(self._ranks), use_local_synchronization=True)
            _groups[self._ranks] = group
        return _groups[self._ranks]


def is_distributed(tensor: object) -> bool:
    """Say whether a tensor is a DTensor, without loading what defines them."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def is_sharded(tensor: Tensor) -> bool:
    """Say whether this rank holds only a part of a tensor."""
    return is_distributed(tensor) and _num_shards(tensor) > 1


def local_part(tensor: Any) -> Tensor:
    """Return what this rank holds of a tensor, in the memory of the tensor itself."""
    if not is_distributed(tensor):
        return tensor if isinstance(tensor, Tensor) else torch.empty(0)
    with torch.no_grad():
        local = tensor.detach().to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    assert isinstance(local, Tensor)
    return local


def local_gradient(param: nn.Parameter) -> Tensor:
    """Return what this rank holds of the gradient of a parameter, nothing where there is none.

    A gradient that is laid out otherwise than its parameter, one of pending sums above all, is first laid out like it.
    """
    grad: Any = param.grad
    if grad is None:
        return torch.empty(0, dtype=param.dtype, device=local_part(param).device)
    if grad.layout is not torch.strided:
        raise UsageError(
            f"gradient layout {grad.layout} in a model with DTensor parameters: expected strided. "
            "Make the gradient dense first."
        )
    if is_distributed(param) and tuple(grad.placements) != tuple(param.placements):  # type: ignore[attr-defined]
        grad = param.grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    local = local_part(grad)
    return torch.view_as_real(local) if local.is_complex() else local


def _num_shards(tensor: Any) -> int:
    """Return into how many parts a tensor is cut, over all dimensions of its mesh."""
    if not is_distributed(tensor):
        return 1
    sizes = [tensor.device_mesh.size(dim) for dim, kind in enumerate(tensor.placements) if not kind.is_replicate()]
    return math.prod(sizes)


def _widest(meshes: Iterable[Any]) -> Any:
    """Return the mesh whose ranks include those of all the others."""
    distinct = list(dict.fromkeys(meshes))
    widest = max(distinct, key=lambda mesh: int(mesh.size()))
    ranks = set(widest.mesh.flatten().tolist())
    for mesh in distinct:
        if not ranks.issuperset(mesh.mesh.flatten().tolist()):
            raise UsageError(
                f"parameters on the meshes {mesh} and {widest}: expected one whose ranks include those of the other. "
                "Shard or replicate the model over all dimensions of one mesh."
            )
    return widest
