"""What an optimizer's step did to sampled weights, summed up over groups of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gradtrack.measure.samples import MOST, sample
from gradtrack.measure.shards import local_part

_FIRST: Final = ("exp_avg", "momentum_buffer")
NUM_SUMS, NUM_SHORT = 14, 6
_SECOND: Final = ("exp_avg_sq", "square_avg")
_MOST_OF_ALL: Final = 1 << 19
_ENOUGH: Final = 4096


class WeightSample:
    """Sampled weights and gradients of a model before an optimizer's step: of what this process holds of them.

    At most `most` elements of a tensor are taken; where nothing is said, 65,536 of them, and fewer where many tensors
    are large, down to 4,096 of each.
    """

    def __init__(
        self, model: nn.Module, gradients: Mapping[str, Tensor], groups: Mapping[str, str], most: int | None = None
    ) -> None:
        self.groups = groups
        self.params = {name: param for name, param in model.named_parameters() if name in gradients and _plain(param)}
        self.most = _shared_out(map(_count, filter(_learns, model.parameters()))) if most is None else most
        self.weights = {name: sample(param, self.most) for name, param in self.params.items()}
        self.gradients = self.following(gradients)

    def after(self) -> dict[str, Tensor]:
        """Return the same elements of the weights as they are now."""
        return {name: sample(param, self.most) for name, param in self.params.items()}

    def following(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the same elements of the gradients of another step."""
        return {
            name: sample(gradients[name], self.most)
            for name, param in self.params.items()
            if name in gradients and gradients[name].numel() == _count(param) * (2 if param.is_complex() else 1)
        }

    def share(self, name: str) -> float:
        """Return how many elements each sampled one stands for."""
        return _count(self.params[name]) / max(len(self.weights[name]), 1)


class UpdateSums:
    """Sums over the parameters of one group, from which the numbers of its update follow."""

    def __init__(self) -> None:
        self.num_elements = self.num_sampled = 0.0
        self._change = self._weight = 0.0
        self._moved = self._pulled = 0.0
        self._next: list[float] = [0.0, 0.0, 0.0]
        self._momentum: list[float] = [0.0, 0.0, 0.0]
        self._first = self._second = 0.0

    def add(
        self,
        share: float,
        before: Tensor,
        after: Tensor,
        gradient: Tensor | None,
        following: Tensor | None,
        moments: SampledMoments,
    ) -> None:
        """Take in one parameter: its weights around the step, its gradient, the next one and the moments."""
        self.num_sampled += len(before)
        self.num_elements += round(share * len(before))
        pulled = [
            None if one is None or gradient is None or one.shape != gradient.shape else one
            for one in (gradient, following, moments.first)
        ]
        change, rows = _rows(before, after, pulled)
        sums = [[share * value for value in row] for row in (rows @ rows.T).tolist()]
        self._change += sums[0][0]
        self._weight += sums[1][1]
        if gradient is None:
            return
        self._pulled += share * int(gradient.count_nonzero())
        self._moved += share * int(torch.logical_and(change, gradient).count_nonzero())
        if pulled[1] is not None:
            self._next = _added(self._next, sums, 2, 3)
        if pulled[2] is not None:
            self._momentum = _added(self._momentum, sums, 2, 4)
            if moments.second is not None and moments.first_bias > 0 and moments.second_bias > 0:
                self._first += sums[4][4] / moments.first_bias**2
                self._second += share * float(moments.second.sum(dtype=torch.float64)) / moments.second_bias

    def merge(self, other: UpdateSums, times: float = 1.0) -> None:
        """Take in the sums of another group, or of what counts only in part."""
        self._take([mine + times * its for mine, its in zip(self.numbers(), other.numbers(), strict=True)])

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
    """Samples of a parameter's first and second moments, and by what their start at zero shrinks them."""

    first: Tensor | None = None
    second: Tensor | None = None
    first_bias: float = 0.0
    second_bias: float = 0.0


class OptimizerMoments:
    """The moments that optimizers keep, found by parameter."""

    def __init__(self, optimizers: Sequence[Any], most: int) -> None:
        self._most = most
        self._owners = {
            id(param): (optimizer, group)
            for optimizer in reversed(optimizers)
            for group in optimizer.param_groups
            for param in group["params"]
        }

    def of(self, param: nn.Parameter) -> SampledMoments:
        """Sample the moments of a parameter, None where there are none."""
        optimizer, group = self._owners.get(id(param), (None, {}))
        state = getattr(optimizer, "state", {}).get(param)
        if not state:
            return SampledMoments()
        first, second = (_found(state, names, param, self._most) for names in (_FIRST, _SECOND))
        return SampledMoments(first, second, *_biases(group, state.get("step")))


def _found(state: Mapping[str, Any], names: Sequence[str], param: nn.Parameter, most: int) -> Tensor | None:
    value = next((state[name] for name in names if name in state), None)
    fits = isinstance(value, Tensor) and value.shape == param.shape and value.dtype.is_floating_point
    return sample(value, most) if fits and isinstance(value, Tensor) else None


def _biases(group: Mapping[str, Any], step: object) -> tuple[float, float]:
    betas = group.get("betas")
    if not isinstance(step, (int, float, Tensor)) or betas is None or len(betas) != 2:
        return 0.0, 0.0
    return 1 - float(betas[0]) ** float(step), 1 - float(betas[1]) ** float(step)


def _rows(before: Tensor, after: Tensor, others: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Return the change, and in float64 the rows change, weight and others, of which all products are needed."""
    rows = torch.empty(2 + len(others), len(before), dtype=torch.float64, device=before.device)
    change = rows[0].copy_(after).sub_(before)
    rows[1] = before
    for row, other in zip(rows[2:], others, strict=True):
        if other is None:
            row.zero_()
        else:
            row.copy_(other)
    return change, rows


def _added(sums: list[float], products: list[list[float]], one: int, other: int) -> list[float]:
    found = (products[one][other], products[one][one], products[other][other])
    return [total + product for total, product in zip(sums, found, strict=True)]


def _cosine(sums: list[float]) -> float | None:
    size = math.sqrt(sums[1] * sums[2])
    return max(-1.0, min(1.0, sums[0] / size)) if size > 0 and math.isfinite(size) else None


def _shared_out(counts: Iterable[int]) -> int:
    """Return how many elements to take of each tensor, so that a look at many takes little longer than one at few."""
    most, sizes = MOST, list(counts)
    while most > _ENOUGH and sum(min(size, most) for size in sizes) > _MOST_OF_ALL:
        most //= 2
    return most


def _learns(param: Tensor) -> bool:
    return param.requires_grad


def _plain(param: Tensor) -> bool:
    return param.layout is torch.strided


def _count(param: Tensor) -> int:
    return local_part(param).numel()
