"""Gradients whose sum over the ranks is still pending, added up together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import mul
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradtrack.measure.shards import is_distributed, local_part

_LARGE: Final = 2**20
"""The elements from which on a gradient is not copied next to others, since sending them costs more than one call."""


def add_up(params: Iterable[nn.Parameter]) -> None:
    """Add up the small gradients that are pending sums of whole parameters: one collective for each axis of a mesh.

    Sequence parallelism leaves the gradients of norms so. Each by itself would be a collective, as in an optimizer.
    """
    waiting = [param for param in params if is_distributed(param) and _is_pending(param)]
    if not waiting:
        return
    with torch.no_grad():
        for axis in range(max(len(param.placements) for param in waiting)):  # type: ignore[attr-defined]
            together: dict[Any, list[nn.Parameter]] = {}
            for param, grad in _along(waiting, axis):
                together.setdefault((grad.device_mesh, grad.dtype), []).append(param)
            for (mesh, _), found in together.items():
                _add_up_along(mesh, axis, found)


def _is_pending(param: nn.Parameter) -> bool:
    grad: Any = param.grad
    return grad is not None and is_distributed(grad) and tuple(grad.placements) != tuple(param.placements)  # type: ignore[attr-defined]


def _along(params: Iterable[nn.Parameter], axis: int) -> Iterator[tuple[nn.Parameter, Any]]:
    """Yield what is whole along an axis of its mesh while its gradient has a pending sum there, with that."""
    for param in params:
        grad: Any = param.grad
        if axis >= len(grad.placements) or not param.placements[axis].is_replicate():  # type: ignore[attr-defined]
            continue
        small = local_part(grad).numel() < _LARGE and not grad.is_complex()
        if small and getattr(grad.placements[axis], "reduce_op", None) == "sum":
            yield param, grad


def _add_up_along(mesh: Any, axis: int, params: list[nn.Parameter]) -> None:
    import torch.distributed
    from torch.distributed.tensor import DTensor, Replicate

    parts: list[Tensor] = [local_part(param.grad) for param in params]
    summed = torch.cat([part.reshape(-1) for part in parts])
    torch.distributed.all_reduce(summed, group=mesh.get_group(axis))
    pieces = torch.split(summed, [part.numel() for part in parts])
    for param, part, piece in zip(params, parts, pieces, strict=True):
        grad: Any = param.grad
        placements = list(grad.placements)
        placements[axis] = Replicate()
        param.grad = DTensor.from_local(
            piece.view(part.shape), mesh, placements, run_check=False, shape=grad.shape, stride=_strides(grad.shape)
        )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()
