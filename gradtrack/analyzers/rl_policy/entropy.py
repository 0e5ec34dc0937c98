"""Entropies of distributions over actions, and the information that observations share with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, reduce
from typing import Final

import numpy as np
import torch
from torch import Tensor

_LOG_RANGE: Final = 0.5 * math.log(2 * math.pi * math.e)
_POINTS: Final = 128
_MASKED: Final = -5e5
"""A logit this far below the largest is that of a forbidden action: -1e6, -1e8 and -1e9 are usual."""


def log_probabilities(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return normalised log-probabilities in float64; `mask` is true for the actions that are allowed.

    An action whose logit is -inf, or as low as what stands in for it, is not allowed either. Where none is allowed all
    of them are -inf, and the state counts for nothing.
    """
    values = logits.detach().double()
    kind = logits.dtype if logits.is_floating_point() else torch.float64
    limit = (values.amax(-1, keepdim=True) + _MASKED).clamp_min(torch.finfo(kind).min / 2)
    values = values.masked_fill((values <= limit) & (values != math.inf), -math.inf)
    if mask is not None:
        values = values.masked_fill(~mask.to(values.device, torch.bool), -math.inf)
    impossible = (values == -math.inf).all(-1, keepdim=True)
    return torch.log_softmax(values, dim=-1).masked_fill(impossible, -math.inf)


def categorical_entropy(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entropy in nats and ln of the number of possible actions, each over all but the last axis."""
    entropy = torch.special.entr(log_probs.exp()).sum(-1)
    return entropy, (log_probs > -math.inf).sum(-1).clamp_min(1).double().log()


def marginal_entropy(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entropy of the action averaged over states (states, actions), and the largest that it can be."""
    probs = log_probs.exp()
    mean = probs.sum(0) / probs.sum().clamp_min(1e-300)
    possible = (log_probs > -math.inf).any(0).sum().clamp_min(1)
    return torch.special.entr(mean).sum(), possible.double().log()


def normal_entropy(std: Tensor) -> Tensor:
    """Return the differential entropy of a Gaussian in nats, which can be negative: never divide it by anything."""
    return _LOG_RANGE + std.detach().double().log()


def effective_range(std: Tensor, width: Tensor | float) -> Tensor:
    """Return the share of an action range of this width that a Gaussian covers, at most 1."""
    share = std.detach().double() * math.exp(_LOG_RANGE) / torch.as_tensor(width, dtype=torch.float64)
    return share.clamp_max(1.0)


def tanh_normal_entropy(mean: Tensor, std: Tensor) -> Tensor:
    """Return the differential entropy in nats of tanh of a Gaussian, by 128-point Gauss-Hermite quadrature.

    It is at most ln 2, near a standard deviation of 0.87, and falls on both sides: a wide one piles up at the ends.
    """
    nodes, weights = hermite(_POINTS)
    scale = std.detach().double()
    location = mean.detach().double() + torch.zeros_like(scale)
    scale = scale + torch.zeros_like(location)
    points = location.unsqueeze(-1) + scale.unsqueeze(-1) * nodes.to(scale.device)
    slope = 2 * (math.log(2) - points - torch.nn.functional.softplus(-2 * points))
    extra: Tensor = (slope * weights.to(scale.device)).sum(-1)
    return normal_entropy(scale) + extra


@cache
def hermite(count: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of the expectation under a standard Gaussian."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())


def theil_sen(values: Sequence[float]) -> float:
    """Return the median slope between any two of evenly spaced values; 0 for fewer than two."""
    series = np.asarray(values, dtype=np.float64)
    first, second = np.triu_indices(len(series), 1)
    return float(np.median((series[second] - series[first]) / (second - first))) if len(series) > 1 else 0.0


def mann_kendall(values: Sequence[float]) -> tuple[float, float]:
    """Return Kendall's sum of signs over all pairs and the two-sided p of no trend, ties taken into account."""
    series = np.asarray(values, dtype=np.float64)
    count = len(series)
    if count < 3:
        return 0.0, 1.0
    first, second = np.triu_indices(count, 1)
    total = float(np.sign(series[second] - series[first]).sum())
    ties = np.unique(series, return_counts=True)[1].astype(np.float64)
    variance = (count * (count - 1) * (2 * count + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if variance <= 0 or total == 0:
        return total, 1.0
    score = (abs(total) - 1) / math.sqrt(variance)
    return total, math.erfc(score / math.sqrt(2))


_STATES: Final = 128
_SAMPLES: Final = 32
_CELLS: Final = 1 << 20
"""The most numbers of a table of states by joint actions."""


def choice_information(choices: Sequence[Tensor]) -> Tensor:
    """Return the information of log-probabilities (states, actions) of choices that are independent in each state.

    It is exact for up to a million pairs of states and joint actions, and beyond from 32 actions each of 128 states.
    """
    num_states = len(choices[0])
    if num_states * math.prod(one.shape[-1] for one in choices) > _CELLS:
        return _sampled_choices([_few(one) for one in choices])
    joint = reduce(lambda one, other: (one.unsqueeze(-1) + other.unsqueeze(-2)).flatten(-2), choices)
    probs = joint.exp()
    found: Tensor = marginal_entropy(joint)[0] - torch.special.entr(probs).sum() / probs.sum()
    return found


def gaussian_information(mean: Tensor, std: Tensor) -> Tensor:
    """Return the information of Gaussians (states, dimensions), whatever one-to-one map comes after them.

    It rests on at most 128 states, and on 32 points of each: of a quadrature in one dimension, drawn in more.
    """
    location, scale = _few(mean.detach().double()), _few(std.detach().double())
    num_states, width = location.shape
    if not num_states:
        return location.new_full((), math.nan)
    if width == 1:
        points, weights = (part.to(location.device) for part in hermite(_SAMPLES))
        nodes = points.reshape(1, -1, 1).expand(num_states, -1, 1)
    else:
        drawn = torch.randn(num_states, _SAMPLES, width, generator=_generator(), dtype=torch.float64)
        nodes, weights = drawn.to(location.device), location.new_full((_SAMPLES,), 1 / _SAMPLES)
    actions = location.unsqueeze(1) + scale.unsqueeze(1) * nodes
    own = -(nodes.square() / 2 + scale.log().unsqueeze(1)).sum(-1)
    others = location.new_zeros(num_states, _SAMPLES, num_states)
    for one in range(width):
        distance = (actions[..., one].unsqueeze(-1) - location[:, one]) / scale[:, one]
        others -= distance.square() / 2 + scale[:, one].log()
    return _difference(own, others, weights)


def _sampled_choices(tables: Sequence[Tensor]) -> Tensor:
    generator, num_states = _generator(), len(tables[0])
    own = tables[0].new_zeros(num_states, _SAMPLES)
    others = tables[0].new_zeros(num_states, _SAMPLES, num_states)
    for table in tables:
        uniform = torch.rand(num_states, _SAMPLES, table.shape[-1], generator=generator, dtype=torch.float64)
        drawn = (table.unsqueeze(1) - (-uniform.log()).log().to(table.device)).argmax(-1)
        own = own + table.gather(1, drawn)
        others = others + table.T[drawn]
    return _difference(own, others, own.new_full((_SAMPLES,), 1 / _SAMPLES))


def _difference(own: Tensor, others: Tensor, weights: Tensor) -> Tensor:
    """Average the logarithm of each action's density in its own state over that of the mean over the states."""
    mixed = torch.logsumexp(others, dim=-1) - math.log(others.shape[-1])
    by_state = torch.where(own > -math.inf, own - mixed, math.nan) @ weights  # a state without an action tells nothing
    return by_state.nanmean().clamp_min(0.0)


def _few(values: Tensor) -> Tensor:
    chosen = torch.linspace(0, len(values) - 1, min(len(values), _STATES), device=values.device).long()
    return values[chosen]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
