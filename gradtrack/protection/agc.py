"""Adaptive gradient clipping (AGC): limits the norm of each unit of a gradient by the norm of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.errors import UsageError
from gradtrack.gradients.collected import Gradients, SharedGradients
from gradtrack.gradients.distributed.merge import Ranks
from gradtrack.gradients.distributed.shards import is_distributed, local_numbers

SMALLEST_WEIGHT: Final = 1e-3
"""Lower bound of a unit's weight norm, so that a unit whose weights are zero can begin to learn."""


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
    """Return the number of units; over ranks it follows from the weights, since a rank may have no gradient."""
    params = grads.layout.params
    tensors = params if isinstance(grads, SharedGradients) else grads.tensors
    pairs = zip(tensors, params, strict=True)
    return sum(tensor.shape[0] if has_rows(tensor, param) else 1 for tensor, param in pairs)


def has_rows(grad: Tensor, param: nn.Parameter) -> bool:
    """Say whether the units are rows; a vector is one unit, also a complex one that is viewed as real pairs."""
    return min(grad.ndim, param.ndim) > 1


def _norms(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the norm of each unit, divided by its largest element first where the squares overflow."""
    wide = values if values.dtype == torch.float64 else values.float()
    if not dims:
        return wide.abs()
    norms: Tensor = torch.linalg.vector_norm(wide, dim=dims, keepdim=True)
    if bool(norms.isfinite().all()):
        return norms
    largest = wide.abs().amax(dim=dims, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)
    norms = torch.linalg.vector_norm(wide / largest, dim=dims, keepdim=True)
    return largest.mul(norms)


Floats = NDArray[np.float64]


class UnitLimits(NamedTuple):
    """The limits of cut units: how many are scaled down, the sum of squares after that, and the factor of each."""

    num_limited: int
    squares: float
    factors: Floats


class _Place(NamedTuple):
    """The cut units of a parameter: the index of each row on this rank, and its weight in a sum over ranks."""

    units: NDArray[np.int64]
    has_rows: bool
    share: float
    param: nn.Parameter


class CutUnits:
    """The units, rows or whole vectors, of which ranks hold parts, with their places in the sums over ranks.

    A row is cut where a parameter is sharded over its columns, as by `RowwiseParallel`, and a vector by every sharding.
    """

    def __init__(self, params: Sequence[nn.Parameter], ranks: Ranks) -> None:
        self._places: dict[int, _Place] = {}
        self._num_units = 0
        for param, sharded, share in zip(params, ranks.sharded, ranks.counts_as(), strict=False):
            if sharded:
                self._add(param, share)

    def __contains__(self, key: int) -> bool:
        return key in self._places

    def sums(self, parts: Mapping[int, Tensor]) -> Floats:
        """Return the sums of squares of this rank's gradients (`parts`, by the ids of parameters) and its weights."""
        found = np.zeros((2, self._num_units))
        for key, place in self._places.items():
            for row, values in zip(found, (parts.get(key), local_numbers(place.param)), strict=True):
                if values is not None and values.numel():
                    row[place.units] += place.share * _squares(values, place)
        return found.ravel()

    def limit(self, sums: Sequence[float], factor: float) -> UnitLimits:
        """Return the limits of the units, from the sums over all ranks."""
        grads, weights = np.asarray(sums).reshape(2, -1)
        norms, limits = np.sqrt(grads), factor * np.maximum(np.sqrt(weights), SMALLEST_WEIGHT)
        beyond = norms > limits
        factors = np.divide(limits, norms, out=np.ones_like(norms), where=beyond)
        left = np.where(beyond, limits * limits, grads)
        return UnitLimits(int(beyond.sum()), float(left.sum()), factors)

    def scale(self, param: nn.Parameter, part: Tensor, factors: Floats) -> None:
        """Scale this rank's part of the gradient of a parameter in place."""
        place = self._places[id(param)]
        own = factors[place.units]
        if part.numel() and (own < 1.0).any():
            wide = torch.float64 if part.dtype == torch.float64 else torch.float32
            shape = (-1, *[1] * (part.ndim - 1))
            part.detach().copy_(part.detach() * torch.from_numpy(own).to(part.device, wide).reshape(shape))

    def _add(self, param: nn.Parameter, share: float) -> None:
        """Add the units of a parameter, if any of them is cut."""
        if not is_distributed(param):
            raise UsageError(
                "clip_type 'agc' with shards that are plain tensors: expected DTensors, which tell where a unit "
                "begins. Use clip_type 'norm', 'adaptive', 'zscore' or 'value'."
            )
        has_rows = param.ndim > 1
        if has_rows and all(map(_is_whole_or_rows, param.placements)):  # type: ignore[attr-defined]
            return
        size = param.shape[0] if has_rows else 1
        units = _rows_here(param) if has_rows else np.zeros(1, dtype=np.int64)
        self._places[id(param)] = _Place(self._num_units + units, has_rows, share, param)
        self._num_units += size


def _is_whole_or_rows(kind: Any) -> bool:
    """Say whether a placement leaves the rows of a matrix whole."""
    return bool(kind.is_replicate()) or getattr(kind, "dim", None) == 0


def _rows_here(param: Any) -> NDArray[np.int64]:
    """Return the rows of a parameter that this rank has a part of, by distributing their numbers like its rows."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    kinds = [kind if getattr(kind, "dim", None) == 0 else Replicate() for kind in param.placements]
    numbers = torch.arange(param.shape[0], device=param.device)
    shared: Any = distribute_tensor(numbers, param.device_mesh, kinds, src_data_rank=None)
    found: NDArray[np.int64] = shared.to_local().cpu().numpy()
    return found


def _squares(values: Tensor, place: _Place) -> Floats:
    """Return the sum of squares of each row on this rank, or of the whole vector."""
    rows = values.reshape(values.shape[0] if place.has_rows else 1, -1)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms.square().cpu().numpy()
