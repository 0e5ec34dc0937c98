"""What an optimizer's step did to sampled weights, summed up over groups of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradtrack.measure.samples import MOST, sample

_FIRST: Final = ("exp_avg", "momentum_buffer")
_SECOND: Final = ("exp_avg_sq", "square_avg")


class WeightSample:
    """Sampled weights and gradients of a model before an optimizer's step."""

    def __init__(
        self, model: nn.Module, gradients: Mapping[str, Tensor], groups: Mapping[str, str], most: int = MOST
    ) -> None:
        self.groups = groups
        self.params = {name: param for name, param in model.named_parameters() if name in gradients and _plain(param)}
        self.weights = {name: sample(param, most) for name, param in self.params.items()}
        self.gradients = {
            name: sample(gradients[name], most)
            for name, param in self.params.items()
            if gradients[name].numel() == param.numel() * (2 if param.is_complex() else 1)
        }
        self._most = most

    def after(self) -> dict[str, Tensor]:
        """Return the same elements of the weights as they are now."""
        return {name: sample(param, self._most) for name, param in self.params.items()}

    def share(self, name: str) -> float:
        """Return how many elements each sampled one stands for."""
        return self.params[name].numel() / max(len(self.weights[name]), 1)


class UpdateSums:
    """Sums over the parameters of one group, from which the numbers of its update follow."""

    def __init__(self) -> None:
        self.num_elements = self.num_sampled = 0
        self._change = self._weight = 0.0
        self._moved = self._pulled = 0
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
        moments: tuple[Tensor | None, Tensor | None, float, float],
    ) -> None:
        """Take in one parameter: its weights around the step, its gradient, the next one and the moments."""
        self.num_sampled += len(before)
        self.num_elements += round(share * len(before))
        change = after.double() - before.double()
        self._change += share * float(change @ change)
        self._weight += share * _square(before)
        if gradient is None:
            return
        pulled = gradient != 0
        self._pulled += int(pulled.sum())
        self._moved += int((pulled & (change != 0)).sum())
        if following is not None and following.shape == gradient.shape:
            self._next = _added(self._next, share, gradient, following)
        first, second, first_bias, second_bias = moments
        if first is not None and first.shape == gradient.shape:
            self._momentum = _added(self._momentum, share, gradient, first)
        if first is not None and second is not None and first_bias > 0 and second_bias > 0:
            self._first += share * _square(first) / first_bias**2
            self._second += share * float(second.double().sum()) / second_bias

    def merge(self, other: UpdateSums) -> None:
        """Take in the sums of another group."""
        self.num_sampled += other.num_sampled
        self.num_elements += other.num_elements
        self._change += other._change
        self._weight += other._weight
        self._pulled += other._pulled
        self._moved += other._moved
        self._next = [mine + its for mine, its in zip(self._next, other._next, strict=True)]
        self._momentum = [mine + its for mine, its in zip(self._momentum, other._momentum, strict=True)]
        self._first += other._first
        self._second += other._second

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


def moments_of(
    optimizers: Sequence[Any], param: nn.Parameter, most: int = MOST
) -> tuple[Tensor | None, Tensor | None, float, float]:
    """Return samples of a parameter's first and second moments, and by what their start at zero shrinks them."""
    for optimizer in optimizers:
        state = getattr(optimizer, "state", {}).get(param)
        if state:
            first, second = (_found(state, names, param, most) for names in (_FIRST, _SECOND))
            return first, second, *_biases(optimizer, param, state.get("step"))
    return None, None, 0.0, 0.0


def _found(state: Mapping[str, Any], names: Sequence[str], param: nn.Parameter, most: int) -> Tensor | None:
    value = next((state[name] for name in names if name in state), None)
    fits = isinstance(value, Tensor) and value.shape == param.shape and value.dtype.is_floating_point
    return sample(value, most) if fits and isinstance(value, Tensor) else None


def _biases(optimizer: Any, param: nn.Parameter, step: object) -> tuple[float, float]:
    if not isinstance(step, (int, float, Tensor)):
        return 0.0, 0.0
    for group in optimizer.param_groups:
        betas = group.get("betas")
        if betas is not None and len(betas) == 2 and any(param is one for one in group["params"]):
            return 1 - float(betas[0]) ** float(step), 1 - float(betas[1]) ** float(step)
    return 0.0, 0.0


def _added(sums: list[float], share: float, first: Tensor, second: Tensor) -> list[float]:
    one, other = first.double(), second.double()
    products = (float(one @ other), float(one @ one), float(other @ other))
    return [total + share * product for total, product in zip(sums, products, strict=True)]


def _cosine(sums: list[float]) -> float | None:
    size = math.sqrt(sums[1] * sums[2])
    return max(-1.0, min(1.0, sums[0] / size)) if size > 0 and math.isfinite(size) else None


def _square(values: Tensor) -> float:
    wide = values.double()
    return float(wide @ wide)


def _plain(param: Tensor) -> bool:
    return not hasattr(param, "placements") and param.layout is torch.strided
