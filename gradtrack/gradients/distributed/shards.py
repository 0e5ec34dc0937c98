"""Parameters that are spread over ranks: DTensor, FSDP, and gradients that wait for a sum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradtrack.errors import UsageError

_WRAPPED = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "_FabricModule": "_forward_module",
}
"""The modules that stand for another one, by name since loading all of them takes time, and where it is."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that the user wrote, whose parameters have the same names however it is run."""
    while True:
        places = (_WRAPPED.get(kind.__name__) for kind in type(model).__mro__)
        inner = next((getattr(model, place, None) for place in places if place), None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_distributed(tensor: object) -> bool:
    """Say whether a tensor is a DTensor, without importing torch.distributed.tensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def whole_loss(loss: Tensor | float | None) -> Tensor | float | None:
    """Return a loss as a tensor that every rank has whole, which for a DTensor takes a collective of its ranks."""
    if not (isinstance(loss, Tensor) and is_distributed(loss)):
        return loss
    with torch.no_grad():
        found: Tensor = loss.full_tensor()  # type: ignore[attr-defined]
    return found


def local_part(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor, which shares the memory of the tensor."""
    if not is_distributed(tensor):
        return tensor.detach() if isinstance(tensor, Tensor) else torch.empty(0)
    with torch.no_grad():  # in which it is handed out as it is; to detach the whole first takes many times as long
        local = tensor.to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    assert isinstance(local, Tensor)
    return local.detach()


def local_numbers(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor as real numbers, two for each element of a complex one."""
    local = local_part(tensor)
    return torch.view_as_real(local.resolve_conj()) if local.is_complex() else local


def local_gradient(param: nn.Parameter) -> Tensor:
    """Return this rank's shard of the gradient of a parameter; an empty tensor without a gradient.

    A gradient with other placements than its parameter, such as a pending sum, is redistributed first.
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
    if grad.is_conj():
        grad = param.grad = grad.resolve_conj()
    local = local_part(grad)
    return torch.view_as_real(local) if local.is_complex() else local


def num_shards(tensor: Any) -> int:
    """Return into how many parts a tensor is cut, over all dimensions of its mesh."""
    if not is_distributed(tensor):
        return 1
    sizes = [tensor.device_mesh.size(dim) for dim, kind in enumerate(tensor.placements) if not kind.is_replicate()]
    return math.prod(sizes)


def widest_mesh(meshes: Iterable[Any]) -> Any:
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


def group_of_modules(modules: Iterable[nn.Module]) -> Any:
    """Return the group over which FSDP 1 has spread parameters, whose shards are plain tensors; None without it."""
    return next((module.process_group for module in modules if _is_flat_sharding(module)), None)


def replicated_params(modules: Sequence[nn.Module]) -> set[int]:
    """Return the ids of the parameters that are known to be the same on every rank: all under DDP, none without it.

    Where FSDP 1 has parts of a model, the parameters of the other parts are.
    """
    everything = {id(param) for module in modules for param in module._parameters.values()}
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules):
        return everything
    flat = [module for module in modules if _is_flat_sharding(module)]
    return everything - {id(param) for module in flat for param in module.parameters()} if flat else set()


def _is_flat_sharding(module: Any) -> bool:
    """Say whether a module is FSDP 1 and does shard, without loading what defines it."""
    known = any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)
    return known and module.sharding_strategy.name != "NO_SHARD"


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
    """Yield the parameters that are whole along an axis of the mesh and whose gradient has a pending sum there."""
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
            piece.view(part.shape),
            mesh,
            placements,
            run_check=False,
            shape=grad.shape,
            stride=torch.empty(grad.shape, device="meta").stride(),
        )
