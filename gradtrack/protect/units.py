"""Adaptive gradient clipping (AGC): each unit of a parameter limited by the norm of its own weights."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from gradtrack.measure.gradients import Gradients, SharedGradients
from gradtrack.measure.shards import local_numbers

SMALLEST_WEIGHT: Final = 1e-3
"""The norm that a unit of smaller weights is taken to have, so that one of zeros can begin to learn."""


def limit_units(grad: Tensor, param: nn.Parameter, factor: float, stand_in: Tensor | None) -> int:
    """Scale down the units whose gradient is too large for their weights; return how many."""
    grad, weight = grad.detach(), local_numbers(param)
    if not grad.numel():
        return 0
    if stand_in is not None and stand_in.layout is torch.sparse_coo:
        weight = weight[tuple(stand_in._indices())]
    dims = tuple(range(1 if has_rows(grad, param) else 0, grad.ndim))
    limit = _norms(weight, dims).clamp_min(SMALLEST_WEIGHT) * factor
    norms = _norms(grad, dims)
    beyond = norms > limit
    count = int(beyond.sum())
    if count:
        factors = torch.where(beyond, limit / norms.clamp_min(torch.finfo(norms.dtype).tiny), 1.0)
        grad.copy_(grad * factors)  # in the wider type of the two, since half precision cannot hold such factors
    return count


def num_units(grads: Gradients) -> int:
    """Return how many units there are; a rank without a gradient has none of its own, but the weights."""
    params = grads.layout.params
    tensors = params if isinstance(grads, SharedGradients) else grads.tensors
    pairs = zip(tensors, params, strict=True)
    return sum(tensor.shape[0] if has_rows(tensor, param) else 1 for tensor, param in pairs)


def has_rows(grad: Tensor, param: nn.Parameter) -> bool:
    """Say whether the units are rows; a vector is one, also where its complex numbers are two real ones each."""
    return min(grad.ndim, param.ndim) > 1


def _norms(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the norm of each unit; by its largest element where the squares overflow."""
    wide = values if values.dtype == torch.float64 else values.float()
    if not dims:
        return wide.abs()
    norms: Tensor = torch.linalg.vector_norm(wide, dim=dims, keepdim=True)
    if bool(norms.isfinite().all()):
        return norms
    largest = wide.abs().amax(dim=dims, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)
    norms = torch.linalg.vector_norm(wide / largest, dim=dims, keepdim=True)
    return largest.mul(norms)
