"""What a policy update is judged by: divergence from the old policy, clipping, the critic's fit, and dormant units."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

_ACTOR: Final = re.compile(r"actor|policy|action|(^|[._])pi([._]|$)|logits|log_std|mu([._]|$)")
_CRITIC: Final = re.compile(r"critic|value|(^|[._])(vf|qf|q)\d*([._]|$)|v_head")


class Divergence(NamedTuple):
    """Three estimates of KL(old || new) from actions of the old policy; k3 is unbiased and never negative."""

    k1: float
    k2: float
    k3: float


def kl_estimates(log_ratio: Tensor) -> Divergence:
    """Return the three estimates from ln(new/old) of the actions that were taken."""
    ratio = log_ratio.detach().double()
    k3 = (torch.expm1(ratio) - ratio).mean()
    return Divergence(float(-ratio.mean()), float(0.5 * ratio.square().mean()), float(k3))


def clip_fraction(log_ratio: Tensor, clip_range: float = 0.2) -> float:
    """Return the share of actions whose probability ratio left the clip range."""
    return float((torch.expm1(log_ratio.detach().double()).abs() > clip_range).double().mean())


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(returns - values)/Var(returns): 0 for a constant critic, NaN where the returns do not vary."""
    target, predicted = returns.detach().double().flatten(), values.detach().double().flatten()
    variance = float(target.var(unbiased=False)) if target.numel() else 0.0
    return 1 - float((target - predicted).var(unbiased=False)) / variance if variance > 0 else math.nan


def trunk_gradient_ratio(actor_loss: Tensor, critic_loss: Tensor, trunk: Iterable[Tensor]) -> float:
    """Return the norm of the actor's over that of the critic's gradient on shared parameters; both graphs are kept."""
    params = list(trunk)
    norms = []
    for loss in (actor_loss, critic_loss):
        grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
        norms.append(math.hypot(*(float(grad.double().norm()) for grad in grads if grad is not None)))  # type: ignore[redundant-expr]
    return _ratio(norms[0], norms[1])


def head_gradient_ratio(norms: Mapping[str, float]) -> float | None:
    """Return the same for parameters that are told apart by their names; None where one side is not there."""
    actor = [norm for name, norm in norms.items() if _ACTOR.search(name) and not _CRITIC.search(name)]
    critic = [norm for name, norm in norms.items() if _CRITIC.search(name)]
    return _ratio(math.hypot(*actor), math.hypot(*critic)) if actor and critic else None


def dormant_share(activations: Tensor, threshold: float = 0.025, *, axis: int = -1) -> float:
    """Return the share of units (an axis) whose mean size is a fraction of their layer's at most (Sokar 2023)."""
    return small_share(unit_sizes(activations, axis), threshold)


def unit_sizes(activations: Tensor, axis: int = -1) -> Tensor:
    """Return the mean size of each unit over everything but its axis."""
    values = activations.detach().double().abs().movedim(axis, -1)
    return values.reshape(-1, values.shape[-1]).mean(0)


def small_share(sizes: Tensor, threshold: float) -> float:
    """Return the share of units whose size is at most a fraction of the mean over all of them."""
    return float((sizes <= threshold * sizes.mean()).double().mean())


def _ratio(actor: float, critic: float) -> float:
    if critic > 0:
        return actor / critic
    return math.inf if actor > 0 else math.nan
