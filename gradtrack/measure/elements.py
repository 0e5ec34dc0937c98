"""A few elements of every parameter, followed through one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.measure.samples import dot, small_array
from gradtrack.measure.shards import local_numbers

_COUNT: Final = 256
_SPARSE: Final = 0.1
_SUBNORMAL: Final = 2.0**-14
_SEARCHED: Final = 1 << 23
_quiet: Final = np.errstate(over="ignore", under="ignore", invalid="ignore")
"""Weights that are not finite are a finding of their own, not one of numpy's."""

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


class Elements:
    """The sampled elements of the parameters of a model before an optimizer step."""

    def __init__(self, params: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor]) -> None:
        self._index: dict[str, Index] = {}
        self._weights: dict[str, Values] = {}
        self._grads: dict[str, Values] = {}
        self._shares: dict[str, float] = {}
        for name, param in params.items():
            grad, own = grads.get(name), local_numbers(param)
            if own.is_floating_point() and own.numel():
                self._add(name, own, grad if grad is not None and grad.shape == own.shape else None)
        self._join()

    def _add(self, name: str, param: Tensor, grad: Tensor | None) -> None:
        index: Index = max(1, param.numel() // _COUNT)
        taken = None if grad is None else _take(grad, index)
        searched = param.ndim > 1 and param.numel() <= _SEARCHED
        if grad is not None and taken is not None and searched and np.count_nonzero(taken) < _SPARSE * len(taken):
            touched = grad.reshape(-1).nonzero()[:, 0]
            index = touched[:: max(1, len(touched) // _COUNT)][:_COUNT] if len(touched) else index
            taken = _take(grad, index)
        self._index[name] = index
        self._weights[name] = _take(param, index)
        self._shares[name] = param.numel() / max(1, len(self._weights[name]))
        if taken is not None:
            self._grads[name] = taken

    def _join(self) -> None:
        """Put the gradients that are taken at equal distances into one vector, each element standing for its share."""
        even = {name: grad for name, grad in self._grads.items() if isinstance(self._index[name], int)}
        weighed = [math.sqrt(self._shares[name]) * grad for name, grad in even.items()]
        self._vector = np.concatenate(weighed) if weighed else np.zeros(0)
        self._square = dot(self._vector, self._vector)
        self._places = tuple((name, self._index[name], len(grad)) for name, grad in even.items())

    def _covers(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor still has the elements that were sampled."""
        index = self._index[name]
        last = (len(self._weights[name]) - 1) * index if isinstance(index, int) else int(index.max())
        return tensor.numel() > last

    @_quiet
    def changes(self, params: Mapping[str, nn.Parameter]) -> dict[str, Change]:
        """Compare with the parameters after the step."""
        found: dict[str, Change] = {}
        for name, before in self._weights.items():
            if name not in params:
                continue
            param = local_numbers(params[name])
            if not self._covers(name, param):
                continue
            moved = _take(param, self._index[name]) - before
            size = max(_norm(before), _norm(before + moved))
            grad = self._grads.get(name)
            live = np.count_nonzero(grad) if grad is not None else 0
            still = math.nan if grad is None or not live else float(np.count_nonzero((moved == 0) & (grad != 0)) / live)
            tiny = math.nan
            if grad is not None and param.dtype == torch.float16 and live:
                tiny = float((abs(grad) < _SUBNORMAL).mean())
            found[name] = Change(_norm(moved) / size if size else math.nan, still, tiny)
        return found

    @_quiet
    def left(self, grads: Mapping[str, Tensor]) -> float:
        """Return how much of the gradients is left, as a ratio of norms."""
        squares = np.zeros(2)
        for name, before in self._grads.items():
            grad = grads.get(name)
            if grad is not None and not grad.is_sparse and self._covers(name, grad):
                after = _take(grad, self._index[name])
                squares += grad.numel() / len(before) * np.array([dot(before, before), dot(after, after)])
        return float(math.sqrt(squares[1] / squares[0])) if squares[0] > 0 else math.nan

    @_quiet
    def cosine_to(self, earlier: Elements) -> float:
        """Return the cosine between these gradients and earlier ones."""
        if self._places == earlier._places:
            return _cosine(np.array([dot(self._vector, earlier._vector), earlier._square, self._square]))
        products = np.zeros(3)
        for name, grad in self._grads.items():
            before = earlier._grads.get(name)
            if before is not None and before.shape == grad.shape and self._same_places(name, earlier):
                inner, mine, its = dot(before, grad), dot(grad, grad), dot(before, before)
                products += self._shares[name] * np.array([inner, its, mine])
        return _cosine(products)

    def _same_places(self, name: str, other: Elements) -> bool:
        mine, its = self._index[name], other._index[name]
        return isinstance(mine, int) and isinstance(its, int) and mine == its

    @_quiet
    def cosine(self, params: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor]) -> float:
        """Return the cosine between the gradients before the step and those of the next one."""
        products = np.zeros(3)
        for name, before in self._grads.items():
            grad, param = grads.get(name), params.get(name)
            if grad is None or param is None or grad.shape != local_numbers(param).shape:
                continue
            after = _take(grad, self._index[name])
            products += (
                grad.numel() / len(before) * np.array([dot(before, after), dot(before, before), dot(after, after)])
            )
        return _cosine(products)


def _take(tensor: Tensor, index: Index) -> Values:
    small = small_array(tensor, tensor.numel())
    if small is not None and isinstance(index, int):
        return small.reshape(-1)[::index][:_COUNT].astype(np.float64)
    flat = tensor.detach().reshape(-1)
    chosen = flat[::index][:_COUNT] if isinstance(index, int) else flat[index]
    return chosen.to("cpu", torch.float64, copy=True).numpy()


def _cosine(products: Values) -> float:
    inner, first, second = products.tolist()
    return inner / math.sqrt(first) / math.sqrt(second) if first > 0 and second > 0 else math.nan


def _norm(values: Values) -> float:
    return math.sqrt(dot(values, values))
