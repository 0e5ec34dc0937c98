"""Sampled elements of every parameter, compared before and after one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.analyzers.tools.samples import Reading, dot, places_of, read_together, small_array
from gradtrack.gradients.distributed.shards import local_numbers
from gradtrack.support.statistics import cosine

_COUNT: Final = 256
_SPARSE: Final = 0.1
_SUBNORMAL: Final = 2.0**-14
_ENOUGH: Final = 16
_SEARCHED: Final = 1 << 23
_quiet: Final = np.errstate(all="ignore")
"""Weights that are not finite are a finding of their own, not one of numpy's."""

_ORDINARY: Final = (Tensor, nn.Parameter)

Values = NDArray[np.float64]
Flags = NDArray[np.bool_]
Part = Values | Tensor
Index = int | Tensor
"""A stride through the flat tensor, or the places of single elements."""


@dataclass(slots=True)
class Change:
    """What one optimizer step did to a parameter, by its sampled elements.

    `ratio` is ‖Δw‖ over the larger of the norms ‖w‖ before and after it, so that it is at most 2;
    `unchanged` is the share of the elements with a gradient that stayed as they were, bit by bit, and `subnormal` the
    share of float16 gradients too small to keep their precision: of those in float16, or that have gone through it.
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


class Taken(NamedTuple):
    """The followed elements of some tensors, on the CPU or still where the tensors are, and which of them have any."""

    parts: list[Part]
    there: Flags


class Elements:
    """The sampled elements of the parameters of a model before an optimizer step.

    Those of all parameters make one vector, which costs a fraction of what a short one for each would. What is on an
    accelerator is known once `reading` is done.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor], reading: Reading | None = None
    ) -> None:
        self._places: list[_Place] = []
        self._subnormal: dict[str, float] = {}
        self._waiting: Taken | None = None
        owns = {name: _own(param) for name, param in params.items()}
        known = {name: own for name, own in owns.items() if own.is_floating_point() and own.numel()}
        whole = {name: _if_whole(grads.get(name), params[name]) for name in known}
        evenly = {name: max(1, own.numel() // _COUNT) for name, own in known.items()}
        parts = [_take(own, evenly[name]) for name, own in known.items()]
        parts += [_take(grad, evenly[name]) for name, grad in whole.items() if grad is not None]
        later = Reading() if reading is None else reading
        later.add(_tensors(parts), lambda *read: self._place(known, whole, evenly, _filled(parts, read)))
        if reading is None:
            later.read()

    def _place(
        self,
        owns: Mapping[str, Tensor],
        grads: Mapping[str, Tensor | None],
        evenly: Mapping[str, int],
        values: list[Values],
    ) -> None:
        """Make one vector of the elements of all parameters: where a gradient is sparse, of those that have one."""
        weights, taken = values[: len(owns)], iter(values[len(owns) :])
        found = [np.zeros(len(weights[i])) if grad is None else next(taken) for i, grad in enumerate(grads.values())]
        indices: list[Index] = [evenly[name] for name in owns]
        lasts = [(len(one) - 1) * evenly[name] for one, name in zip(weights, owns, strict=True)]
        for number, chosen in _sparse(owns, grads, found).items():
            weights[number], found[number], indices[number], lasts[number] = chosen
        start = 0
        for name, weight, grad, index, last in zip(owns, weights, found, indices, lasts, strict=True):
            length, has_grad = len(weight), grads[name] is not None
            place = slice(start, start + length)
            self._places.append(_Place(name, index, last, place, owns[name].numel() / length, has_grad))
            start += length
            if owns[name].dtype is torch.float16 and has_grad and grad.any():
                self._subnormal[name] = float((abs(grad) < _SUBNORMAL).mean())
        self._weights, self._grads = _joined(weights), _joined(found)
        self._starts = np.array([place.within.start for place in self._places], dtype=np.int64)
        self._shares = np.array([place.share for place in self._places])
        self._with_grad = np.array([place.has_grad for place in self._places], dtype=bool)
        # the gradients that are taken at equal distances make one vector, each element standing for its share
        even = [place for place in self._places if place.has_grad and isinstance(place.index, int)]
        self._subnormal = self._gone_through_float16() | self._subnormal
        self._vector = _joined([math.sqrt(place.share) * self._grads[place.within] for place in even])
        self._square = dot(self._vector, self._vector)
        self._even = tuple((place.name, place.index, place.within.stop - place.within.start) for place in even)

    @_quiet
    def _gone_through_float16(self) -> dict[str, float]:
        """Return the share of subnormal numbers among gradients each of which is a number of float16, zeros aside.

        Under autocast gradients in float32 are what float16 has left of them. By chance one in some thousands fits; so
        does what rounding leaves of a gradient that is zero by nature, which those of most elements are not.
        """
        size, live = np.abs(self._grads), self._grads != 0
        fits = self._sums((live & (size.astype(np.float16) == size)).astype(np.float64))
        counts, small = self._sums(live.astype(np.float64)), self._sums((live & (size < _SUBNORMAL)).astype(np.float64))
        through = (fits == counts) & (counts >= _ENOUGH)
        if 2 * counts[through].sum() < counts.sum():
            return {}
        return {self._places[index].name: float(small[index] / counts[index]) for index in np.flatnonzero(through)}

    def _sums(self, values: Values) -> Values:
        """Return the sum for each parameter."""
        found: Values = np.add.reduceat(values, self._starts) if len(values) else np.zeros(0)
        return found

    def _again(self, tensors: Sequence[Tensor | None]) -> Taken:
        """Take the same elements of other tensors, and note of which parameters these have them still."""
        found: list[Part] = []
        there = np.zeros(len(tensors), dtype=bool)
        for number, (place, tensor) in enumerate(zip(self._places, tensors, strict=True)):
            own = None if tensor is None or tensor.is_sparse else _own(tensor)
            if own is not None and own.numel() > place.last:
                there[number] = True
                found.append(_take(own, place.index))
            else:
                found.append(np.zeros(place.within.stop - place.within.start))
        return Taken(found, there)

    def follow(
        self, params: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor]
    ) -> tuple[dict[str, Change], float, float]:
        """Return the changes, the cosine, and what `left` could not tell before, all read together."""
        now = self._again([params.get(place.name) for place in self._places])
        then = self._again([_if_whole(grads.get(place.name), params.get(place.name)) for place in self._places])
        waiting, self._waiting = self._waiting, None
        taken = [now, then, *([] if waiting is None else [waiting])]
        read = iter(read_together(_tensors([part for one in taken for part in one.parts])))
        known = [(_joined(_filled(one.parts, read)), one.there) for one in taken]
        return self._changes(*known[0]), self._cosine(*known[1]), math.nan if waiting is None else self._left(*known[2])

    def changes(self, params: Mapping[str, nn.Parameter]) -> dict[str, Change]:
        """Compare with the parameters after the step."""
        return self.follow(params, {})[0]

    def cosine(self, params: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor]) -> float:
        """Return the cosine between the gradients before the step and those of the next one."""
        return self.follow(params, grads)[1]

    def left(self, grads: Mapping[str, Tensor]) -> float:
        """Return how much of the gradients is left, as a ratio of norms; NaN where `follow` has to tell it."""
        taken = self._again([grads.get(place.name) for place in self._places])
        if _tensors(taken.parts):
            self._waiting = taken
            return math.nan
        return self._left(_joined(_filled(taken.parts, ())), taken.there)

    @_quiet
    def _changes(self, now: Values, there: Flags) -> dict[str, Change]:
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
    def _left(self, now: Values, there: Flags) -> float:
        before, after = self._compared(there & self._with_grad, self._grads**2, now**2)
        return math.sqrt(after / before) if before > 0 else math.nan

    @_quiet
    def _cosine(self, now: Values, there: Flags) -> float:
        which = there & self._with_grad
        return cosine(*self._compared(which, self._grads * now, self._grads**2, now**2))

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


def _sparse(
    owns: Mapping[str, Tensor], grads: Mapping[str, Tensor | None], taken: Sequence[Values]
) -> dict[int, tuple[Values, Values, Index, int]]:
    """Return weights and gradients where a sparse gradient is not zero, their places and the last of these."""
    found: dict[int, Tensor] = {}
    parts: list[Tensor] = []
    for number, (own, grad) in enumerate(zip(owns.values(), grads.values(), strict=True)):
        if grad is None or own.ndim < 2 or own.numel() > _SEARCHED:
            continue
        if np.count_nonzero(taken[number]) < _SPARSE * len(taken[number]):
            flat = grad.detach().reshape(-1)
            places, total = _touched(flat)
            found[number] = places
            parts += [places, total, own.detach().reshape(-1)[places], flat[places]]
    read = iter(read_together(parts))
    chosen: dict[int, tuple[Values, Values, Index, int]] = {}
    for number, places in found.items():
        where, total, weight, gradient = (next(read) for _ in range(4))
        count = int(total)
        if count:
            values = [part[:count].double().numpy() for part in (weight, gradient)]
            chosen[number] = (values[0], values[1], places[:count], int(where[:count].max()))
    return chosen


def _touched(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of elements that are not zero, and how many of the places these are."""
    if flat.is_cpu:
        every = flat.nonzero()[:, 0]
        places = every[:: max(1, len(every) // _COUNT)][:_COUNT]
        return places, torch.tensor(len(places))
    touched = flat != 0
    return places_of(touched, _COUNT, lambda count: (count // _COUNT).clamp_min(1)), touched.sum().clamp_max(_COUNT)


def _own(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, which an ordinary one need not be asked for."""
    return tensor if type(tensor) in _ORDINARY and not tensor.is_complex() else local_numbers(tensor)


def _if_whole(grad: Tensor | None, param: Tensor | None) -> Tensor | None:
    """Return a gradient that has the shape of its parameter."""
    return grad if grad is not None and param is not None and grad.shape == _own(param).shape else None


def _take(tensor: Tensor, index: Index) -> Part:
    """Copy some elements, to the CPU where they are there, else beside them."""
    small = small_array(tensor, tensor.numel())
    if small is not None and isinstance(index, int):
        return small.reshape(-1)[::index][:_COUNT].astype(np.float64)
    flat = tensor.detach().reshape(-1)
    chosen = flat[::index][:_COUNT] if isinstance(index, int) else flat[index]
    return chosen.to(torch.float64, copy=True).numpy() if chosen.is_cpu else chosen.clone()


def _tensors(parts: Sequence[Part]) -> list[Tensor]:
    return [part for part in parts if isinstance(part, Tensor)]


def _filled(parts: Sequence[Part], read: Iterable[Tensor]) -> list[Values]:
    """Return the parts as arrays, those that were tensors from what was read."""
    known = iter(read)
    return [next(known).double().numpy() if isinstance(part, Tensor) else part for part in parts]


def _joined(parts: Sequence[Values]) -> Values:
    return np.concatenate(parts) if parts else np.zeros(0)
