"""Metrics of a policy update: KL, clipped share, explained variance, input sensitivity and dormant units."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gradtrack.analyzers.tools.hooks import ModuleHook
from gradtrack.analyzers.tools.modules import layers, own_parameters
from gradtrack.errors import InputTypeError
from gradtrack.support.interrupts import Changes

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
    """Return the share of units (an axis) whose mean size is a fraction of their layer's at most (Sokar 2023).

    `activations` is what one layer returned, with the units on the last axis, or on axis 1 after a convolution.
    """
    if not isinstance(activations, Tensor):
        raise InputTypeError(
            f"activations {type(activations).__name__}: expected the tensor that one layer returned. "
            "Call dormant_share once for each layer."
        )
    return small_share(unit_sizes(activations, axis), threshold)


def unit_sizes(activations: Tensor, axis: int = -1) -> Tensor:
    """Return the mean size of each unit over everything but its axis."""
    values = activations.detach().double().abs().movedim(axis, -1)
    return values.reshape(-1, values.shape[-1]).mean(0)


def small_share(sizes: Tensor, threshold: float = 0.025) -> float:
    """Return the share of units whose size is at most a fraction of the mean over all of them."""
    return float((sizes <= threshold * sizes.mean()).double().mean())


def _ratio(actor: float, critic: float) -> float:
    if critic > 0:
        return actor / critic
    return math.inf if actor > 0 else math.nan


def followed(batch: Any) -> Any:
    """Return a batch whose first floating tensor gets a gradient by the next backward pass."""
    values = list(batch) if isinstance(batch, tuple) else [batch]
    for index, value in enumerate(values):
        if isinstance(value, Tensor) and value.is_floating_point():
            values[index] = value.detach().requires_grad_()
            return tuple(values) if isinstance(batch, tuple) else values[0]
    return batch


def input_gradient_norm(batch: Any) -> float | None:
    """Return the norm of that gradient, None where there is none."""
    values = batch if isinstance(batch, tuple) else (batch,)
    first = next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)
    return None if first is None or first.grad is None else float(first.grad.double().norm())


_ACTIVATIONS: Final = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Hardswish,
)


class DormantUnits:
    """The share of dormant units of each activation module, judged by the mean size over all passes watched.

    A unit is a channel after a convolution and a feature elsewhere. A module that is called several times in a pass has
    units at each of its calls, and the mean of their shares.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._axis = -1
        self._calls: Counter[str] = Counter()
        self._sizes: dict[tuple[str, int], list[Tensor]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the forward passes of a `with` block."""
        with Changes() as changes:
            changes.hook(self._model.register_forward_pre_hook, ModuleHook(self._model, self._begin))
            for name, module in layers(self._model):
                look = self._sees(name) if isinstance(module, _ACTIVATIONS) else self._passes(module)
                if look is not None:
                    changes.hook(module.register_forward_hook, ModuleHook(module, look))
            yield

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of dormant units by module."""
        found: dict[str, list[float]] = {}
        for (name, _), sizes in self._sizes.items():
            found.setdefault(name, []).append(small_share(torch.stack(sizes).mean(0)))
        return {name: sum(values) / len(values) for name, values in found.items()}

    def _begin(self, *_: Any) -> None:
        self._calls.clear()
        self._axis = -1

    def _passes(self, module: nn.Module) -> Callable[..., None] | None:
        """Note, where a module mixes units, on which axis it leaves them."""
        if not any(param.ndim > 1 for param in own_parameters(module)):
            return None
        axis = -1 - (len(module.kernel_size) if isinstance(module, _ConvNd) else 0)

        def passed(*_: Any) -> None:
            self._axis = axis

        return passed

    def _sees(self, name: str) -> Callable[..., None]:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or not output.numel() or output.ndim < -self._axis:
                return
            self._calls[name] += 1
            known = self._sizes.setdefault((name, self._calls[name]), [])
            sizes = unit_sizes(output, self._axis)
            if not known or known[0].shape == sizes.shape:
                known.append(sizes)

        return look
