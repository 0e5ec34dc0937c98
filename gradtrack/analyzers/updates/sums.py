"""Sums over sampled weights, gradients and moments, from which the numbers of an update follow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.analyzers.tools.samples import MOST, read_together, sampled
from gradtrack.gradients.distributed.shards import local_part
from gradtrack.support.statistics import cosine

_FIRST: Final = ("exp_avg", "momentum_buffer")
_SECOND: Final = ("exp_avg_sq", "square_avg")
_ENOUGH: Final = 4096
_AT_ONCE: Final = 1 << 18

Values = NDArray[np.floating[Any]]
Flags = NDArray[np.bool_]


class UpdateSums(NamedTuple):
    """Sums over parameters, from which the numbers of their update follow; the first six are enough for its length.

    `pulled` counts the elements with a gradient, `moved` those of them that the step moved. `change` and `weight` are
    sums of squares; for a cosine there are the product of two vectors and the squares of each. `first` and `second` are
    the squares of the first moment and the second moment, both freed of their bias.
    """

    num_elements: float = 0.0
    num_sampled: float = 0.0
    pulled: float = 0.0
    moved: float = 0.0
    change: float = 0.0
    weight: float = 0.0
    next_product: float = 0.0
    before_next: float = 0.0
    next_squares: float = 0.0
    momentum_product: float = 0.0
    before_momentum: float = 0.0
    momentum_squares: float = 0.0
    first: float = 0.0
    second: float = 0.0

    @classmethod
    def together(cls, parts: Iterable[Sequence[float]]) -> UpdateSums:
        """Add up the sums of several parameters or groups."""
        return cls(*map(sum, zip(*parts, strict=True)))

    @property
    def ratio(self) -> float | None:
        """Return ‖Δw‖/‖w‖."""
        return math.sqrt(self.change / self.weight) if self.weight > 0 else None

    @property
    def unchanged_fraction(self) -> float | None:
        """Return the share of elements with a gradient that did not move."""
        return 1 - self.moved / self.pulled if self.pulled else None

    @property
    def gradient_cosine(self) -> float | None:
        """Return the cosine between the step's gradient and the next one."""
        return _known(cosine(self.next_product, self.before_next, self.next_squares))

    @property
    def momentum_cosine(self) -> float | None:
        """Return the cosine between the step's gradient and the first moment after it."""
        return _known(cosine(self.momentum_product, self.before_momentum, self.momentum_squares))

    @property
    def moment_ratio(self) -> float | None:
        """Return the root of the first moment's squares over the second moment, both without their bias."""
        return math.sqrt(self.first / self.second) if self.second > 0 else None


NUM_SUMS, NUM_SHORT = len(UpdateSums._fields), 6


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


class WeightSample:
    """Sampled weights and gradients of a model before an optimizer's step: of what this process holds of them.

    At most `most` elements of a tensor are taken; where nothing is said, 65,536 of all together, but no fewer than
    4,096 of each.
    """

    def __init__(
        self, model: nn.Module, gradients: Mapping[str, Tensor], groups: Mapping[str, str], most: int | None = None
    ) -> None:
        self._groups = groups
        if most is None:
            most = _shared_out([_count(param) for param in model.parameters() if param.requires_grad])
        params = {
            name: param
            for name, param in model.named_parameters()
            if name in gradients and param.layout is torch.strided and _count(param)
        }
        self._parts = [SampledPart(part, gradients, most) for part in _cut(params, most)]

    def sums(
        self,
        gradients: Mapping[str, Tensor],
        optimizers: Sequence[Any],
        counts_as: Mapping[str, float] | None = None,
    ) -> dict[str, UpdateSums]:
        """Return the sums of every group, from the gradients of the next step and the present state of the optimizers.

        Of a parameter that other ranks have as well there is only as much as `counts_as` says.
        """
        rows: dict[str, list[Sequence[float]]] = {group: [UpdateSums()] for group in self._groups.values()}
        owners = {
            id(param): (optimizer, group)
            for optimizer in reversed(optimizers)
            for group in optimizer.param_groups
            for param in group["params"]
        }
        for part, numbers in self._numbers(gradients, owners):
            for name, row in zip(part.params, numbers.tolist(), strict=True):
                times = 1.0 if counts_as is None else counts_as.get(name, 0.0)
                if times:
                    rows[self._groups[name]].append([times * number for number in row])
        return {group: UpdateSums.together(parts) for group, parts in rows.items()}

    def _numbers(
        self, gradients: Mapping[str, Tensor], owners: Mapping[int, Any]
    ) -> Iterator[tuple[SampledPart, Values]]:
        """Yield the numbers of each part: what is on an accelerator is read for all of them at once."""
        at_once = len(self._parts) if any(part.device.type != "cpu" for part in self._parts) else 1
        for start in range(0, len(self._parts), max(1, at_once)):
            parts = self._parts[start : start + at_once]
            collected = [part.collect(gradients, owners) for part in parts]
            values = iter(read_together(tensor for one in collected for tensor in one.tensors))
            for part, one in zip(parts, collected, strict=True):
                with np.errstate(all="ignore"):
                    yield part, part.numbers([next(values) for _ in one.tensors], one)


class _Collected(NamedTuple):
    """What is read of some parameters after a step, and which of them have what."""

    tensors: list[Tensor]
    there: Flags
    has_following: Flags
    has_first: Flags
    has_second: Flags
    betas: list[tuple[float, float] | None]


class SampledPart:
    """The samples of some parameters, which make one vector in which each parameter has its place.

    They stay on the device of the parameters until all that is compared with them is read together.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor], most: int) -> None:
        self.params, self._most = params, most
        parts = [sampled(param, most) for param in params.values()]
        self._lengths = [len(part) for part in parts]
        self._counts = np.array([_count(param) for param in params.values()], dtype=np.float64)
        self._starts = np.cumsum([0, *self._lengths], dtype=np.int64)[:-1]
        self.device = parts[0].device
        self.weights = torch.cat(parts)
        self.gradients, self._has_gradient = self._following(gradients)

    def after(self) -> tuple[Tensor, Flags]:
        """Return the same elements of the weights as they are now, and which parameters still have them."""
        return self._same(list(self.params.values()))

    def collect(self, gradients: Mapping[str, Tensor], owners: Mapping[int, Any]) -> _Collected:
        """Return what to read: samples before the step, after it and of the moments, and the optimizers' steps."""
        (after, there), (following, has_following) = self.after(), self._following(gradients)
        found = [_moments_of(param, *owners.get(id(param), (None, {}))) for param in self.params.values()]
        first_moments, second_moments, betas, steps = zip(*found, strict=True)
        (first, has_first), (second, has_second) = self._same(first_moments), self._same(second_moments)
        tensors = [self.weights, self.gradients, after, following, first, second, *steps]
        return _Collected(tensors, there, has_following, has_first, has_second, [*betas])

    def numbers(self, values: Sequence[Tensor], found: _Collected) -> Values:
        """Return the numbers of `UpdateSums` of each parameter, in which a sampled element stands for its share."""
        before, mine, after, following, first, second = map(_array, values[:6])
        before, mine, following, first, second = (
            part.astype(np.float64, copy=False) for part in (before, mine, following, first, second)
        )
        biases = np.array([_biases(*one) for one in zip(found.betas, values[6:], strict=True)])
        change = after - before
        live, squares, first_squares = mine != 0, self._sums(mine * mine), self._sums(first * first)
        compared, pushed = found.has_following & self._has_gradient, found.has_first & self._has_gradient
        unbiased = pushed & found.has_second & (biases > 0).all(1)
        columns = [
            self._sums(live),
            self._sums(live & (change != 0)),
            self._sums(change * change),
            self._sums(before * before),
            np.where(compared, self._sums(mine * following), 0.0),
            np.where(compared, squares, 0.0),
            np.where(compared, self._sums(following * following), 0.0),
            np.where(pushed, self._sums(mine * first), 0.0),
            np.where(pushed, squares, 0.0),
            np.where(pushed, first_squares, 0.0),
            np.where(unbiased, first_squares / biases[:, 0] ** 2, 0.0),
            np.where(unbiased, self._sums(second) / biases[:, 1], 0.0),
        ]
        lengths = np.array(self._lengths, dtype=np.float64)
        table = np.stack([self._counts, lengths, *(self._counts / lengths * one for one in columns)], 1)
        return np.where(found.there[:, None], table, 0.0)

    def _following(self, gradients: Mapping[str, Tensor]) -> tuple[Tensor, Flags]:
        """Return the same elements of the gradients of a step, and which parameters have one there."""
        return self._same([_fitting(gradients.get(name), param) for name, param in self.params.items()])

    def _sums(self, values: NDArray[Any]) -> Values:
        """Return the sum for each parameter."""
        found: Values = np.add.reduceat(values, self._starts, dtype=np.float64)
        return found

    def _same(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor, Flags]:
        """Return the same elements of other tensors, zeros for those that are not there, and which are."""
        parts, there = [], np.zeros(len(tensors), dtype=bool)
        for index, (tensor, length) in enumerate(zip(tensors, self._lengths, strict=True)):
            part = None if tensor is None else sampled(tensor, self._most)
            there[index] = part is not None and len(part) == length
            found = part if part is not None and there[index] else torch.zeros(length, device=self.device)
            parts.append(found if found.device == self.device else found.to(self.device))  # moments on the host
        return torch.cat(parts), there


def _cut(params: Mapping[str, nn.Parameter], most: int) -> list[dict[str, nn.Parameter]]:
    """Cut the parameters into parts, each on one device, with so few elements that its numbers take little memory."""
    found: list[dict[str, nn.Parameter]] = []
    room, device = 0, None
    for name, param in params.items():
        size = min(_count(param), most)
        if size > room or param.device != device:
            found.append({})
            room, device = _AT_ONCE, param.device
        found[-1][name] = param
        room -= size
    return found


def _array(tensor: Tensor) -> Values:
    return (tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()).numpy()


_NO_STEP: Final = torch.zeros(())


def _moments_of(
    param: nn.Parameter, optimizer: Any, group: Mapping[str, Any]
) -> tuple[Tensor | None, Tensor | None, tuple[float, float] | None, Tensor]:
    """Return the two moments of a parameter, the betas of its optimizer and the number of its steps."""
    state = getattr(optimizer, "state", {}).get(param)
    if not state:
        return None, None, None, _NO_STEP
    first, second = (_found(state, names, param) for names in (_FIRST, _SECOND))
    step, betas = state.get("step"), group.get("betas")
    if not isinstance(step, (int, float, Tensor)) or betas is None or len(betas) != 2:
        return first, second, None, _NO_STEP
    return first, second, betas, step if isinstance(step, Tensor) else torch.tensor(float(step))


def _found(state: Mapping[str, Any], names: Sequence[str], param: nn.Parameter) -> Tensor | None:
    value = next((state[name] for name in names if name in state), None)
    if (
        not isinstance(value, Tensor) or value.layout is not torch.strided
    ):  # SGD's momentum of sparse gradients is sparse
        return None
    return value if value.shape == param.shape and value.dtype.is_floating_point else None


def _biases(betas: tuple[float, float] | None, step: Tensor) -> tuple[float, float]:
    return (0.0, 0.0) if betas is None else (1 - float(betas[0]) ** float(step), 1 - float(betas[1]) ** float(step))


def _fitting(gradient: Tensor | None, param: nn.Parameter) -> Tensor | None:
    """Return a gradient that has all the elements of its parameter."""
    size = _count(param) * (2 if param.is_complex() else 1)
    return gradient if gradient is not None and gradient.numel() == size else None


def _shared_out(sizes: Sequence[int]) -> int:
    """Return how many elements to take of each tensor, so that a look at many takes little longer than one at few."""
    most = MOST
    while most > _ENOUGH and sum(min(size, most) for size in sizes) > MOST:
        most //= 2
    return most


def _count(param: Tensor) -> int:
    return local_part(param).numel()
