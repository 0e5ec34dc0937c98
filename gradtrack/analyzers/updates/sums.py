"""Sums over sampled weights, gradients and moments, from which the numbers of an update follow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.analyzers.tools.samples import MOST, sampled
from gradtrack.gradients.distributed.shards import local_part
from gradtrack.support.statistics import cosine

_FIRST: Final = ("exp_avg", "momentum_buffer")
NUM_SUMS, NUM_SHORT = 14, 6
_SECOND: Final = ("exp_avg_sq", "square_avg")
_MOST_OF_ALL: Final = MOST
_ENOUGH: Final = 4096
_AT_ONCE: Final = 1 << 18

Values = NDArray[np.floating[Any]]
Flags = NDArray[np.bool_]


class UpdateSums:
    """Sums over the parameters of one group, from which the numbers of its update follow."""

    def __init__(self) -> None:
        self.num_elements = self.num_sampled = 0.0
        self._change = self._weight = 0.0
        self._moved = self._pulled = 0.0
        self._next: list[float] = [0.0, 0.0, 0.0]
        self._momentum: list[float] = [0.0, 0.0, 0.0]
        self._first = self._second = 0.0

    def add(self, numbers: Sequence[float]) -> None:
        """Take in the numbers of a parameter, or of another group."""
        self._take([mine + its for mine, its in zip(self.numbers(), numbers, strict=True)])

    def numbers(self) -> list[float]:
        """Return everything as numbers that can be added up; the first `NUM_SHORT` tell the length of the step."""
        counts = [self.num_elements, self.num_sampled, self._pulled, self._moved]
        return [*counts, self._change, self._weight, *self._next, *self._momentum, self._first, self._second]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> UpdateSums:
        """Return the sums that these numbers are, the last of which may be left out."""
        found = cls()
        found._take([*numbers, *[0.0] * (NUM_SUMS - len(numbers))])
        return found

    def _take(self, numbers: Sequence[float]) -> None:
        self.num_elements, self.num_sampled, self._pulled, self._moved = numbers[:4]
        self._change, self._weight = numbers[4:6]
        self._next, self._momentum = list(numbers[6:9]), list(numbers[9:12])
        self._first, self._second = numbers[12:14]

    @property
    def ratio(self) -> float | None:
        """Return ‖Δw‖/‖w‖."""
        return math.sqrt(self._change / self._weight) if self._weight > 0 else None

    @property
    def unchanged_fraction(self) -> float | None:
        """Return the share of elements with a gradient that did not move."""
        return 1 - self._moved / self._pulled if self._pulled else None

    @property
    def gradient_cosine(self) -> float | None:
        """Return the cosine between the step's gradient and the next one."""
        return _cosine(self._next)

    @property
    def momentum_cosine(self) -> float | None:
        """Return the cosine between the step's gradient and the first moment after it."""
        return _cosine(self._momentum)

    @property
    def moment_ratio(self) -> float | None:
        """Return the root of the first moment's squares over the second moment, both without their bias."""
        return math.sqrt(self._first / self._second) if self._second > 0 else None


class SampledMoments(NamedTuple):
    """Samples of the first and second moments, and by what their start at zero shrinks them, a column for each.

    There is a flag and a row for each parameter: of some an optimizer keeps the first alone, of others nothing.
    """

    first: Values
    has_first: Flags
    second: Values
    has_both: Flags
    biases: Values


class WeightSample:
    """Sampled weights and gradients of a model before an optimizer's step: of what this process holds of them.

    At most `most` elements of a tensor are taken; where nothing is said, 65,536 of all together, but no fewer than
    4,096 of each.
    """

    def __init__(
        self, model: nn.Module, gradients: Mapping[str, Tensor], groups: Mapping[str, str], most: int | None = None
    ) -> None:
        self._groups = groups
        most = _shared_out(map(_count, filter(_learns, model.parameters()))) if most is None else most
        params = {name: param for name, param in model.named_parameters() if name in gradients and _shows(param)}
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
        groups = {group: UpdateSums() for group in dict.fromkeys(self._groups.values())}
        owners = {
            id(param): (optimizer, group)
            for optimizer in reversed(optimizers)
            for group in optimizer.param_groups
            for param in group["params"]
        }
        for part in self._parts:
            with np.errstate(all="ignore"):
                numbers = part.numbers(gradients, owners)
            for name, row in zip(part.params, numbers.tolist(), strict=True):
                times = 1.0 if counts_as is None else counts_as.get(name, 0.0)
                if times:
                    groups[self._groups[name]].add([times * number for number in row])
        return groups


class SampledPart:
    """The samples of some parameters, which make one vector in which each parameter has its place."""

    def __init__(self, params: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor], most: int) -> None:
        self.params, self._most = params, most
        parts = [sampled(param, most) for param in params.values()]
        self._lengths = [len(part) for part in parts]
        self._counts = np.array([_count(param) for param in params.values()], dtype=np.float64)
        self._starts = np.cumsum([0, *self._lengths], dtype=np.int64)[:-1]
        self.weights = _joined(parts)
        self.gradients, self._has_gradient = self._following(gradients)

    def after(self) -> tuple[Values, Flags]:
        """Return the same elements of the weights as they are now, and which parameters still have them."""
        return self._same(list(self.params.values()))

    def numbers(self, gradients: Mapping[str, Tensor], owners: Mapping[int, Any]) -> Values:
        """Return the numbers of `UpdateSums` of each parameter, in which a sampled element stands for its share."""
        (after, there), before, mine = self.after(), _exact(self.weights), _exact(self.gradients)
        (following, has_following), moments = self._following(gradients), self._moments(owners)
        change, following = after - before, _exact(following)
        live, squares, first = mine != 0, self._sums(mine * mine), self._sums(moments.first * moments.first)
        compared, pushed = has_following & self._has_gradient, moments.has_first & self._has_gradient
        unbiased = moments.has_both & self._has_gradient
        columns = [
            self._sums(live),
            self._sums(live & (change != 0)),
            self._sums(change * change),
            self._sums(before * before),
            np.where(compared, self._sums(mine * following), 0.0),
            np.where(compared, squares, 0.0),
            np.where(compared, self._sums(following * following), 0.0),
            np.where(pushed, self._sums(mine * moments.first), 0.0),
            np.where(pushed, squares, 0.0),
            np.where(pushed, first, 0.0),
            np.where(unbiased, first / moments.biases[:, 0] ** 2, 0.0),
            np.where(unbiased, self._sums(moments.second) / moments.biases[:, 1], 0.0),
        ]
        lengths = np.array(self._lengths, dtype=np.float64)
        shares = self._counts / lengths
        found = np.stack([self._counts, lengths, *(shares * one for one in columns)], 1)
        return np.where(there[:, None], found, 0.0)

    def _following(self, gradients: Mapping[str, Tensor]) -> tuple[Values, Flags]:
        """Return the same elements of the gradients of a step, and which parameters have one there."""
        return self._same([_fitting(gradients.get(name), param) for name, param in self.params.items()])

    def _moments(self, owners: Mapping[int, Any]) -> SampledMoments:
        found = [_moments_of(param, *owners.get(id(param), (None, {}))) for param in self.params.values()]
        first, has_first = self._same([one for one, _, _ in found])
        second, has_second = self._same([one for _, one, _ in found])
        biases = np.array([one for _, _, one in found])
        has_both = has_first & has_second & (biases > 0).all(1)
        return SampledMoments(_exact(first), has_first, _exact(second), has_both, biases)

    def _sums(self, values: NDArray[Any]) -> Values:
        """Return the sum for each parameter."""
        found: Values = np.add.reduceat(values, self._starts, dtype=np.float64)
        return found

    def _same(self, tensors: Sequence[Tensor | None]) -> tuple[Values, Flags]:
        """Return the same elements of other tensors, zeros for those that are not there, and which are."""
        parts, there = [], np.zeros(len(tensors), dtype=bool)
        for index, (tensor, length) in enumerate(zip(tensors, self._lengths, strict=True)):
            part = None if tensor is None else sampled(tensor, self._most)
            there[index] = part is not None and len(part) == length
            parts.append(part if part is not None and there[index] else torch.zeros(length))
        return _joined(parts), there


def _cut(params: Mapping[str, nn.Parameter], most: int) -> list[dict[str, nn.Parameter]]:
    """Cut the parameters into parts with so few elements that what is computed from them takes little memory."""
    found: list[dict[str, nn.Parameter]] = []
    room = 0
    for name, param in params.items():
        size = min(_count(param), most)
        if size > room or not found:
            found.append({})
            room = _AT_ONCE
        found[-1][name] = param
        room -= size
    return found


def _joined(parts: Sequence[Tensor]) -> Values:
    """Copy some tensors into one vector, each device being waited for once."""
    devices = {part.device for part in parts}
    whole = torch.cat(list(parts)).cpu() if len(devices) == 1 else _joined_from(devices, parts)
    return (whole if whole.dtype in (torch.float32, torch.float64) else whole.float()).numpy()


def _joined_from(devices: Iterable[torch.device], parts: Sequence[Tensor]) -> Tensor:
    there = {device: [part for part in parts if part.device == device] for device in devices}
    pieces = {device: iter(torch.split(torch.cat(own).cpu(), [*map(len, own)])) for device, own in there.items()}
    return torch.cat([next(pieces[part.device]) for part in parts])


def _exact(values: Values) -> Values:
    return values.astype(np.float64, copy=False)


def _moments_of(
    param: nn.Parameter, optimizer: Any, group: Mapping[str, Any]
) -> tuple[Tensor | None, Tensor | None, tuple[float, float]]:
    state = getattr(optimizer, "state", {}).get(param)
    if not state:
        return None, None, (0.0, 0.0)
    first, second = (_found(state, names, param) for names in (_FIRST, _SECOND))
    return first, second, _biases(group, state.get("step"))


def _found(state: Mapping[str, Any], names: Sequence[str], param: nn.Parameter) -> Tensor | None:
    value = next((state[name] for name in names if name in state), None)
    fits = isinstance(value, Tensor) and value.shape == param.shape and value.dtype.is_floating_point
    return value if fits else None


def _biases(group: Mapping[str, Any], step: object) -> tuple[float, float]:
    betas = group.get("betas")
    if not isinstance(step, (int, float, Tensor)) or betas is None or len(betas) != 2:
        return 0.0, 0.0
    return 1 - float(betas[0]) ** float(step), 1 - float(betas[1]) ** float(step)


def _fitting(gradient: Tensor | None, param: nn.Parameter) -> Tensor | None:
    """Return a gradient that has all the elements of its parameter."""
    size = _count(param) * (2 if param.is_complex() else 1)
    return gradient if gradient is not None and gradient.numel() == size else None


def _cosine(sums: list[float]) -> float | None:
    found = cosine(*sums)
    return None if math.isnan(found) else found


def _shared_out(counts: Iterable[int]) -> int:
    """Return how many elements to take of each tensor, so that a look at many takes little longer than one at few."""
    most, sizes = MOST, list(counts)
    while most > _ENOUGH and sum(min(size, most) for size in sizes) > _MOST_OF_ALL:
        most //= 2
    return most


def _learns(param: Tensor) -> bool:
    return param.requires_grad


def _shows(param: Tensor) -> bool:
    return param.layout is torch.strided and _count(param) > 0


def _count(param: Tensor) -> int:
    return local_part(param).numel()
