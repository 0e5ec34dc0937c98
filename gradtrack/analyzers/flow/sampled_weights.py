"""Sampled elements of every parameter, compared before and after one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.analyzers.tools.samples import dot, small_array
from gradtrack.gradients.distributed.shards import local_numbers
from gradtrack.support.statistics import cosine

_COUNT: Final = 256
_SPARSE: Final = 0.1
_SUBNORMAL: Final = 2.0**-14
_SEARCHED: Final = 1 << 23
_quiet: Final = np.errstate(all="ignore")
"""Weights that are not finite are a finding of their own, not one of numpy's."""

_ORDINARY: Final = (Tensor, nn.Parameter)

Values = NDArray[np.float64]
Index = int | Tensor
"""A stride through the flat tensor, or the places of single elements."""


@dataclass(slots=True)
class Change:
    """What one optimizer step did to a parameter, by its sampled elements.

    `ratio` is ‖Δw‖ over the larger of the norms ‖w‖ before and after it, so that it is at most 2;
    `unchanged` is the share of the elements with a gradient that stayed as they were, bit by bit, and `subnormal` the
    share of float16 gradients too small to keep their precision.
    """

    ratio: float
    unchanged: float
    subnormal: float = math.nan


@dataclass(slots=True)
class _Place:
    """Where the elements of a parameter were taken, and where they are among those of all parameters."""

    name: str
    index: Index
    last: int
    within: slice
    share: float
    has_grad: bool


class Elements:
    """The sampled elements of the parameters of a model before an optimizer step.

    Those of all parameters make one vector, which costs a fraction of what a short one for each would.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor]) -> None:
        self._places: list[_Place] = []
        self._subnormal: dict[str, float] = {}
        weights: list[Values] = []
        taken: list[Values] = []
        start = 0
        for name, param in params.items():
            own = _own(param)
            if not own.is_floating_point() or not own.numel():
                continue
            index, grad = _choose(own, _if_whole(grads.get(name), param))
            weights.append(_take(own, index))
            length = len(weights[-1])
            taken.append(np.zeros(length) if grad is None else grad)
            last, share = (length - 1) * index if isinstance(index, int) else int(index.max()), own.numel() / length
            self._places.append(_Place(name, index, last, slice(start, start + length), share, grad is not None))
            start += length
            if own.dtype is torch.float16 and grad is not None and grad.any():
                self._subnormal[name] = float((abs(grad) < _SUBNORMAL).mean())
        self._weights, self._grads = _joined(weights), _joined(taken)
        self._starts = np.array([place.within.start for place in self._places], dtype=np.int64)
        self._shares = np.array([place.share for place in self._places])
        self._with_grad = np.array([place.has_grad for place in self._places], dtype=bool)
        # the gradients that are taken at equal distances make one vector, each element standing for its share
        even = [place for place in self._places if place.has_grad and isinstance(place.index, int)]
        self._vector = _joined([math.sqrt(place.share) * self._grads[place.within] for place in even])
        self._square = dot(self._vector, self._vector)
        self._even = tuple((place.name, place.index, place.within.stop - place.within.start) for place in even)

    def _sums(self, values: Values) -> Values:
        """Return the sum for each parameter."""
        found: Values = np.add.reduceat(values, self._starts) if len(values) else np.zeros(0)
        return found

    def _again(self, tensors: Sequence[Tensor | None]) -> tuple[Values, NDArray[np.bool_]]:
        """Return the same elements of other tensors, and of which parameters these have them still."""
        found: list[Values] = []
        there = np.zeros(len(tensors), dtype=bool)
        for number, (place, tensor) in enumerate(zip(self._places, tensors, strict=True)):
            own = None if tensor is None or tensor.is_sparse else _own(tensor)
            if own is not None and own.numel() > place.last:
                there[number] = True
                found.append(_take(own, place.index))
            else:
                found.append(np.zeros(place.within.stop - place.within.start))
        return _joined(found), there

    @_quiet
    def changes(self, params: Mapping[str, nn.Parameter]) -> dict[str, Change]:
        """Compare with the parameters after the step."""
        now, there = self._again([params.get(place.name) for place in self._places])
        moved, live = now - self._weights, self._grads != 0
        size = np.sqrt(np.fmax(self._sums(self._weights**2), self._sums(now**2)))
        ratios = np.sqrt(self._sums(moved**2)) / size
        still = self._sums(((moved == 0) & live).astype(np.float64)) / self._sums(live.astype(np.float64))
        return {
            place.name: Change(ratio, unchanged, self._subnormal.get(place.name, math.nan))
            for place, ratio, unchanged, known in zip(self._places, ratios.tolist(), still.tolist(), there, strict=True)
            if known
        }

    @_quiet
    def left(self, grads: Mapping[str, Tensor]) -> float:
        """Return how much of the gradients is left, as a ratio of norms."""
        now, there = self._again([grads.get(place.name) for place in self._places])
        before, after = self._compared(there & self._with_grad, self._grads**2, now**2)
        return math.sqrt(after / before) if before > 0 else math.nan

    @_quiet
    def cosine(self, params: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor]) -> float:
        """Return the cosine between the gradients before the step and those of the next one."""
        now, there = self._again([_if_whole(grads.get(place.name), params.get(place.name)) for place in self._places])
        return cosine(*self._compared(there & self._with_grad, self._grads * now, self._grads**2, now**2))

    def _compared(self, which: NDArray[np.bool_], *products: Values) -> list[float]:
        """Return the sums of products over some of the parameters, each element standing for its share."""
        return [float((self._shares * self._sums(product))[which].sum()) for product in products]

    @_quiet
    def cosine_to(self, earlier: Elements) -> float:
        """Return the cosine between these gradients and earlier ones."""
        if self._even == earlier._even:
            return cosine(dot(self._vector, earlier._vector), earlier._square, self._square)
        known = {place.name: place for place in earlier._places if place.has_grad and isinstance(place.index, int)}
        products = np.zeros(3)
        for place in self._places:
            other = known.get(place.name)
            if other is None or not place.has_grad or not isinstance(place.index, int) or place.index != other.index:
                continue
            grad, before = self._grads[place.within], earlier._grads[other.within]
            if len(grad) == len(before):
                products += place.share * np.array([dot(before, grad), dot(before, before), dot(grad, grad)])
        return cosine(*products.tolist())


def _choose(param: Tensor, grad: Tensor | None) -> tuple[Index, Values | None]:
    """Return which elements of a parameter to follow, and its gradient there: where it is sparse, what is not zero."""
    index: Index = max(1, param.numel() // _COUNT)
    if grad is None:
        return index, None
    taken = _take(grad, index)
    if param.ndim > 1 and param.numel() <= _SEARCHED and np.count_nonzero(taken) < _SPARSE * len(taken):
        touched = grad.reshape(-1).nonzero()[:, 0]
        if len(touched):
            index = touched[:: max(1, len(touched) // _COUNT)][:_COUNT]
            taken = _take(grad, index)
    return index, taken


def _own(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, which an ordinary one need not be asked for."""
    return tensor if type(tensor) in _ORDINARY and not tensor.is_complex() else local_numbers(tensor)


def _if_whole(grad: Tensor | None, param: Tensor | None) -> Tensor | None:
    """Return a gradient that has the shape of its parameter."""
    return grad if grad is not None and param is not None and grad.shape == _own(param).shape else None


def _take(tensor: Tensor, index: Index) -> Values:
    small = small_array(tensor, tensor.numel())
    if small is not None and isinstance(index, int):
        return small.reshape(-1)[::index][:_COUNT].astype(np.float64)
    flat = tensor.detach().reshape(-1)
    chosen = flat[::index][:_COUNT] if isinstance(index, int) else flat[index]
    return chosen.to("cpu", torch.float64, copy=True).numpy()


def _joined(parts: Sequence[Values]) -> Values:
    return np.concatenate(parts) if parts else np.zeros(0)
