"""The torch engine on an accelerator: sums by operations whose number does not grow with the number of tensors.

Gradients are copied next to each other into a window of memory, which is read a line of elements at a time. The rows of
the lines are merged on the host. All windows of a step use the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.gradients.moments import MAX, MIN, NAN, NEGINF, POSINF, SQUARES, SUM, ZEROS, Rows, empty_row
from gradtrack.gradients.torch_cpu import flat

WITHOUT_FLOAT64: Final = frozenset({"mps"})
_MOST_ELEMENTS: Final = 3 << 20
"""The elements of a window: two of them in float64, and what an operation needs beside them, are below 64 MB."""
_LINE, _NARROW_LINE = 512, 128
_TOTAL, _NORM, _LOW, _HIGH, _NONZERO, _CODES, _NORM_AFTER = range(7)


class Orders(NamedTuple):
    """What a step does with gradients on their device, as far as the host knows it beforehand."""

    limit: float | None = None
    """The limit to clip to; None where nothing is clipped."""
    epsilon: float = 0.0
    clip_type: str = "norm"
    """`norm`, for every strategy that scales all gradients by one factor, `value` or `agc`."""
    limits: Mapping[torch.dtype, float] | None = None
    """The limit of each element, as each type holds it."""
    num_limitable: int = 0
    """The number of elements or units, of which the report tells the share that was limited."""
    replacements: Mapping[torch.dtype, tuple[float, float]] | None = None
    """What replaces NaN and infinity in gradients of each type; None where they stay."""
    variances: bool = False
    """Whether the variances of float64 gradients are to be exact where their means hide them."""


class Sums(NamedTuple):
    """The sums of a step as they were copied from a device."""

    rows: Rows
    parts: tuple[NDArray[Any], ...] | None = None
    """The fields of `variance.Parts` of the float64 gradients; None where they were not asked for."""
    num_limited: float = 0.0
    squares_after: float = 0.0
    """How much elementwise clipping has limited, and the sum of squares after that."""


def coefficient_on_device(norm: Tensor, limit: float, epsilon: float, spared: Tensor | None) -> Tensor:
    """Return the factor of `coefficient_of` without reading the norm; 1 where `spared` is set."""
    coefficient = (limit / (norm + epsilon)).clamp(max=1.0)
    return coefficient if spared is None else torch.where(spared, 1.0, coefficient)


_Plan = TypeVar("_Plan", bound="TorchPlan | Any")


class Plans(Generic[_Plan]):
    """The plans of the last few models, since making one costs as much as several steps."""

    _MOST: Final = 4

    def __init__(self, make: Callable[[Sequence[Tensor]], _Plan]) -> None:
        self._make, self._kept = make, list[_Plan]()

    def of(self, grads: Sequence[Tensor]) -> _Plan:
        """Return the plan for gradients, which are all on one device."""
        for position, plan in enumerate(self._kept):
            if plan.fits(grads):
                if position:
                    self._kept.insert(0, self._kept.pop(position))
                return plan
        plan = self._make(grads)
        self._kept[self._MOST - 1 :] = []
        self._kept.insert(0, plan)
        return plan


def halves_of(exponent: int) -> tuple[float, float]:
    """Return two factors that divide by 2**exponent together, since one alone may be out of range."""
    half = -exponent // 2
    return math.ldexp(1.0, half), math.ldexp(1.0, -exponent - half)


class _Window(NamedTuple):
    """Gradients, or parts of large ones, that are in the window together: with places for them in both halves."""

    parts: list[tuple[int, int, int]]
    places: list[Tensor]
    copies: list[Tensor]
    elements: Tensor
    scratch: Tensor
    dtype: torch.dtype
    filled: Tensor | None
    """The places of a window that hold an element, if any does not: those are NaN."""


@final
class TorchPlan:
    """The windows for gradients of the same types and shapes on one device.

    Between reports the host does not wait: `start` queues a step, and `read` takes what was copied from the device.
    """

    def __init__(self, grads: Sequence[Tensor], memory: dict[torch.device, list[Tensor]] | None = None) -> None:
        self.device = grads[0].device
        self._facts = [(grad.dtype, grad.shape) for grad in grads]
        self._num_tensors = len(grads)
        self._wide = torch.float32 if self.device.type in WITHOUT_FLOAT64 else torch.float64
        self._line, self._code = (_NARROW_LINE, 1 << 8) if self._wide == torch.float32 else (_LINE, 1 << 12)
        self._tensor_of: NDArray[np.int64] = np.zeros(0, np.int64)
        self._filled: NDArray[np.int64] = np.zeros(0, np.int64)
        """The tensor of each line, and the number of its elements."""
        parts = [self._divide(grads, dtype) for dtype in dict.fromkeys(grad.dtype for grad in grads)]
        most = max((self._length(one) for several in parts for one in several), default=0)
        halves = self._share(memory if memory is not None else {}, most)
        self._windows: list[_Window] = []
        first = 0
        for one in (one for several in parts for one in several):
            lines = self._length(one) // self._line
            self._windows.append(self._window(one, halves, self._filled[first : first + lines]))
            first += lines
        self._tables: tuple[Tensor, ...] | None = None
        self._num_gaps = int((self._line - self._filled).sum())
        self.found_inf: Tensor

    def _share(self, memory: dict[torch.device, list[Tensor]], length: int) -> list[Tensor]:
        """Return the memory of the windows, which plans share, since a step uses it by itself."""
        if self.device not in memory or memory[self.device][0].numel() < length:
            size = length if 4 * length <= _MOST_ELEMENTS else _MOST_ELEMENTS
            memory[self.device] = [torch.empty(size, dtype=self._wide, device=self.device) for _ in range(2)]
        return memory[self.device]

    def fits(self, grads: Sequence[Tensor]) -> bool:
        """Tell whether gradients have the types, the shapes and the device that the plan was made for."""
        return (
            len(grads) == self._num_tensors
            and grads[0].device == self.device
            and all((grad.dtype, grad.shape) == facts for grad, facts in zip(grads, self._facts, strict=True))
        )

    def clips(self, clip_type: str, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
        """Say whether a strategy needs no decision of the host: not where elements or units are limited."""
        return clip_type == "norm"

    def rows(self, grads: Sequence[Tensor], factors: tuple[float, float] = (1.0, 1.0)) -> Rows:
        """Return the row of each gradient, multiplied by both factors, after waiting for the device."""
        with torch.no_grad():
            lines, _ = self._measure(grads, Orders(), factors)
            return self._merge(lines.cpu().double().numpy())

    def start(self, grads: Sequence[Tensor], orders: Orders, weights: Sequence[Tensor] = ()) -> Tensor:
        """Measure and protect gradients by operations on their device; return the numbers that `read` takes.

        `found_inf` is the flag that optimizers skip a step by.
        """
        with torch.no_grad():
            lines, around = self._measure(grads, orders)
            bad = lines.select(0, _CODES).sum() > self._num_gaps
            self.found_inf = bad.float()
            if orders.limit is not None:
                replaces = orders.replacements is not None
                norm = torch.linalg.vector_norm(lines.select(0, _NORM_AFTER if replaces else _NORM))
                _scale(grads, coefficient_on_device(norm, orders.limit, orders.epsilon, None if replaces else bad))
            return lines.flatten() if around is None else torch.cat([lines.flatten(), around.flatten()])

    def norm(self, numbers: Tensor) -> Tensor:
        """Return the norm before clipping on the device, from what `start` has returned."""
        size = len(self._filled)
        norm: Tensor = torch.linalg.vector_norm(numbers.narrow(0, _NORM * size, size))
        return norm

    def local_sums(self, grads: Sequence[Tensor], orders: Orders) -> tuple[Tensor, Tensor]:
        """Measure gradients and replace what is not finite; return sums and ends of each, on their device.

        The sums are those of the row of a gradient but for the ends: the negated smallest and the largest element.
        """
        lines, _ = self._measure(grads, orders)
        if self._tables is None:
            tables = self._tensor_of, self._filled
            self._tables = tuple(torch.from_numpy(one).to(self.device, non_blocking=True) for one in tables)
        of, filled = self._tables
        total, norm, low, high, nonzero, codes, *_ = lines.unbind()
        kinds = [codes % self._code - (self._line - filled)]
        kinds += [(codes / self._code**power).floor() % self._code for power in (1, 2)]
        zeros = filled - nonzero - torch.stack(kinds).sum(dim=0)
        columns = torch.stack([total, norm.square(), zeros, *kinds])
        sums = columns.new_zeros(6, self._num_tensors).index_add_(1, of, columns)
        ends = columns.new_full((2, self._num_tensors), -math.inf)
        ends.scatter_reduce_(1, of.expand(2, -1), torch.stack([-low, high]), "amax")
        return sums.t(), ends.t()

    def change(self, grads: Sequence[Tensor], orders: Orders, coefficient: Tensor | None, bad: Tensor) -> None:
        """Clip gradients, of which what is not finite was replaced while they were measured."""
        if coefficient is not None:
            _scale(grads, coefficient)

    def read(self, values: NDArray[np.float64], orders: Orders) -> Sums:
        """Return the sums of a step from the numbers that `start` has returned, on the host now."""
        num_columns = 6 if orders.replacements is None else 7
        size = num_columns * len(self._filled)
        lines = values[:size].reshape(num_columns, -1)
        if size == len(values):
            return Sums(self._merge(lines))
        around = values[size:].reshape(3, -1)
        wide = np.flatnonzero([self._facts[index][0] == torch.float64 for index in self._tensor_of])
        counts = (self._filled - self._counts(lines).sum(axis=0))[wide].astype(np.float64)
        return Sums(self._merge(lines), (around[0], around[1], around[2] ** 2, counts, self._tensor_of[wide]))

    def _divide(self, grads: Sequence[Tensor], dtype: torch.dtype) -> list[list[tuple[int, int, int]]]:
        """Return for each window of a type its parts: the tensor, and the first and the last of its elements."""
        windows: list[list[tuple[int, int, int]]] = []
        room = 0
        for index, grad in enumerate(grads):
            size = grad.numel() if grad.dtype == dtype else 0
            for start in range(0, size, _MOST_ELEMENTS):
                stop = min(size, start + _MOST_ELEMENTS)
                lines = -(-(stop - start) // self._line)
                if lines * self._line > room:
                    windows.append([])
                    room = _MOST_ELEMENTS
                room -= lines * self._line
                windows[-1].append((index, start, stop))
                self._tensor_of = np.append(self._tensor_of, np.full(lines, index))
                filled = np.minimum(stop - start - self._line * np.arange(lines), self._line)
                self._filled = np.append(self._filled, filled)
        return windows

    def _length(self, parts: list[tuple[int, int, int]]) -> int:
        return sum(-(-(stop - start) // self._line) * self._line for _, start, stop in parts)

    def _window(
        self, parts: list[tuple[int, int, int]], halves: Sequence[Tensor], filled: NDArray[np.int64]
    ) -> _Window:
        length = self._length(parts)
        places: list[list[Tensor]] = []
        for half in halves:
            place, found = 0, []
            for index, start, stop in parts:
                shape = self._facts[index][1]
                one = half.narrow(0, place, stop - start)
                found.append(one.view(shape) if stop - start == shape.numel() else one)
                place += -(-(stop - start) // self._line) * self._line
            places.append(found)
        elements, scratch = (half.narrow(0, 0, length).view(-1, self._line) for half in halves)
        mask = None
        if filled.sum() < length:
            mask = torch.arange(self._line, device=self.device) < torch.from_numpy(filled[:, None]).to(self.device)
        return _Window(parts, places[0], places[1], elements, scratch, self._facts[parts[0][0]][0], mask)

    def _measure(
        self, grads: Sequence[Tensor], orders: Orders, factors: tuple[float, float] = (1.0, 1.0)
    ) -> tuple[Tensor, Tensor | None]:
        """Return the columns of all lines, and the columns of sums about centres where they are asked for."""
        pieces: dict[int, Sequence[Tensor]] = {}
        columns, around = list[Tensor](), list[Tensor]()
        for window in self._windows:
            sources = []
            for index, start, stop in window.parts:
                if stop - start < grads[index].numel():
                    if index not in pieces:
                        pieces[index] = torch.split(flat(grads[index]), _MOST_ELEMENTS)
                    sources.append(pieces[index][start // _MOST_ELEMENTS])
                else:
                    sources.append(grads[index])
            columns.append(torch.stack(self._measure_window(window, sources, orders, factors, around)))
        if orders.replacements is not None:
            for index, parts in pieces.items():
                if parts[0].data_ptr() != grads[index].data_ptr():  # it has gaps, so that its line is a copy
                    grads[index].copy_(torch.cat(list(parts)).view(grads[index].shape))
        wide = torch.cat(around, dim=1) if around else None
        if not columns:
            return torch.zeros(6 if orders.replacements is None else 7, 0, dtype=self._wide, device=self.device), wide
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1), wide

    def _measure_window(
        self,
        window: _Window,
        sources: list[Tensor],
        orders: Orders,
        factors: tuple[float, float],
        around: list[Tensor],
    ) -> list[Tensor]:
        """Return the columns of the lines of a window, and replace what is to be replaced."""
        elements, scratch, infinity = window.elements, window.scratch, float("inf")
        if window.filled is not None:
            elements.fill_(float("nan"))
        torch._foreach_copy_(window.places, sources)
        for factor in factors:
            if factor != 1.0:
                elements.mul_(factor)
        torch.nan_to_num(elements, infinity, infinity, infinity, out=scratch)
        low = scratch.amin(dim=1)
        torch.nan_to_num(elements, -infinity, -infinity, -infinity, out=scratch)
        high = scratch.amax(dim=1)
        after = []
        if orders.replacements is not None:
            nan, large = orders.replacements[window.dtype]
            torch.nan_to_num(elements, nan, large, -large, out=scratch)
            torch._foreach_copy_(sources, window.copies)
            if window.filled is not None:
                scratch.mul_(window.filled)
            after = [torch.linalg.vector_norm(scratch, dim=1)]
        if orders.variances and window.dtype == torch.float64:
            centres = torch.nan_to_num(elements.narrow(1, 0, 1), 0.0, 0.0, 0.0)
            torch.sub(elements, centres, out=scratch).nan_to_num_(0.0, 0.0, 0.0)
            around.append(
                torch.stack([centres.flatten(), scratch.sum(dim=1), torch.linalg.vector_norm(scratch, dim=1)])
            )
        torch.nan_to_num(elements, 0.0, 0.0, 0.0, out=scratch)
        total, norm = scratch.sum(dim=1), torch.linalg.vector_norm(scratch, dim=1)
        nonzero = torch.linalg.vector_norm(scratch, 0, dim=1)
        # What is left is not finite; the digits of one sum count each kind.
        codes = elements.sub_(scratch).nan_to_num_(1.0, float(self._code), float(self._code**2)).sum(dim=1)
        return [total, norm, low, high, nonzero, codes, *after]

    def _counts(self, lines: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the numbers of NaN, +Inf and -Inf of each line."""
        codes = lines[_CODES].astype(np.int64)
        nan = codes % self._code - (self._line - self._filled)
        return np.stack([nan, codes // self._code % self._code, codes // self._code**2])

    def _merge(self, lines: NDArray[np.float64]) -> Rows:
        """Return the rows of the tensors, from the columns of their lines."""
        rows: Rows = np.tile(np.array(empty_row()), (self._num_tensors, 1))
        counts, of, num = self._counts(lines), self._tensor_of, self._num_tensors
        rows[:, SUM] = np.bincount(of, lines[_TOTAL], num)
        rows[:, SQUARES] = np.bincount(of, lines[_NORM] ** 2, num)
        np.minimum.at(rows[:, MIN], of, lines[_LOW])
        np.maximum.at(rows[:, MAX], of, lines[_HIGH])
        rows[:, ZEROS] = np.bincount(of, self._filled - lines[_NONZERO] - counts.sum(axis=0), num)
        for column, values in zip((NAN, POSINF, NEGINF), counts, strict=True):
            rows[:, column] = np.bincount(of, values, num)
        return rows


def _scale(grads: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply gradients in place by a number on their device, those of each type in one operation.

    In half precision the product with a float32 is rounded, as elsewhere, and not the number itself.
    """
    factor = coefficient.to(torch.float32)
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        several = [grad for grad in grads if grad.dtype == dtype]
        if dtype in (torch.float32, torch.float64):
            torch._foreach_mul_(several, factor if dtype == torch.float32 else coefficient.to(dtype))
            continue
        try:
            torch._amp_foreach_non_finite_check_and_unscale_(several, factor.new_zeros(1), factor.view(1))
        except NotImplementedError:  # the device has no such operation
            torch._foreach_mul_(several, factor)
