"""What the state tells about the action: the mutual information of a batch of states and what a policy does in them.

It is the mean over states s and their actions a of ln p(a|s) - ln p(a), with p(a) the mean of p(a|s) over the states:
between 0 and ln of the number of states, over all parts of an action together. The sum over the parts alone would count
twice what two parts both tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Final

import torch
from torch import Tensor

from gradtrack.measure.entropy import hermite, marginal_entropy

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
