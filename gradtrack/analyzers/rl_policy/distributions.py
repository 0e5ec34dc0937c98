"""Action distributions, read from what a policy returns, as discrete choices and continuous dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributions as td

from gradtrack.analyzers.rl_policy.entropy import log_probabilities
from gradtrack.errors import InputTypeError, UsageError

_SAMPLES: Final = 256
_EXPECTED: Final = "expected a torch distribution, logits, (mean, std), or a list of them for several choices"


@dataclass(frozen=True, slots=True)
class Choice:
    """One discrete choice: log-probabilities (states, actions), -inf where an action is not allowed."""

    log_probs: Tensor


@dataclass(frozen=True, slots=True)
class Gaussian:
    """Gaussian dimensions (states, dimensions), squashed by tanh or not; `log_scale` is ln of a scale after it."""

    mean: Tensor
    std: Tensor
    squashed: bool = False
    log_scale: Tensor | None = None
    joint_entropy: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Other:
    """Any further distribution by its entropy (states, dimensions), its spread and the width of its support."""

    entropy: Tensor
    std: Tensor | None = None
    width: float | None = None


Part = Choice | Gaussian | Other


def read_actions(distribution: Any, mask: Any = None) -> list[Part]:
    """Return the parts of a distribution; `mask` is true for allowed actions, one per choice or side by side."""
    with torch.no_grad():
        parts = _read(distribution)
        return parts if mask is None else _masked(parts, mask)


def _read(source: Any) -> list[Part]:
    if isinstance(source, Tensor):
        return [_choice(source)]
    if isinstance(source, td.Distribution):
        return _of_distribution(source)
    inner = getattr(source, "distribution", getattr(source, "distributions", None))
    if inner is not None:  # the wrapper of a reinforcement learning library
        return _wrapped(source, inner)
    if isinstance(source, tuple) and len(source) == 2 and all(isinstance(item, Tensor) for item in source):
        _check_std(source[1])
        return [_gaussian(*source)]
    if isinstance(source, (list, tuple)) and source:
        return [part for item in source for part in _read(item)]
    raise InputTypeError(f"distribution {type(source).__name__}: {_EXPECTED}.")


def _wrapped(source: Any, inner: Any) -> list[Part]:
    parts = _read(inner)
    if "squashed" not in type(source).__name__.lower() and getattr(source, "bijector", None) is None:
        return parts
    return [Gaussian(part.mean, part.std, squashed=True) if isinstance(part, Gaussian) else part for part in parts]


def _choice(logits: Tensor) -> Choice:
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise UsageError(f"logits of shape {tuple(logits.shape)}: expected one column per action.")
    return Choice(log_probabilities(logits.reshape(-1, logits.shape[-1])))


def _check_std(std: Tensor) -> None:
    """Refuse a deviation that is none, where it can be read at once; a note tells of it on an accelerator."""
    if std.is_cpu and bool((std <= 0).any()):
        least = float(std.min())
        raise UsageError(f"std {least:.3g}: expected deviations above 0. Pass log_std.exp() for log_std.")


def _gaussian(mean: Tensor, std: Tensor, **options: Any) -> Gaussian:
    try:
        mean, std = torch.broadcast_tensors(mean.detach(), std.detach())  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise UsageError(
            f"mean of shape {tuple(mean.shape)}, std of shape {tuple(std.shape)}: expected one std for each mean."
        ) from None
    columns = mean.shape[-1] if mean.ndim else 1
    return Gaussian(mean.reshape(-1, columns), std.reshape(-1, columns), **options)


def _of_distribution(found: td.Distribution) -> list[Part]:
    base, dimensions = _base(found)
    if isinstance(base, (td.Categorical, td.OneHotCategorical, td.RelaxedOneHotCategorical)):
        return _choices(base.logits, dimensions)
    if isinstance(base, (td.Bernoulli, td.RelaxedBernoulli)):
        both = torch.stack([-base.logits, base.logits], dim=-1).double()
        log_probs = torch.nn.functional.logsigmoid(both)
        return _choices(log_probs, max(dimensions, min(log_probs.ndim - 2, 1)))
    if isinstance(base, td.Normal):
        return [_gaussian(*_columns(base.loc, base.scale, dimensions=dimensions))]
    if isinstance(base, td.MultivariateNormal | td.LowRankMultivariateNormal):
        return [_gaussian(base.mean, base.stddev, joint_entropy=_entropy(base).reshape(-1))]
    squashed = _squashed(base, dimensions) if isinstance(base, td.TransformedDistribution) else None
    return [squashed] if squashed is not None else _other(base, dimensions)


def _base(found: Any) -> tuple[Any, int]:
    """Return the distribution inside of independent ones, and how many of its dimensions they count as the action's."""
    if not isinstance(found, td.Independent):
        return found, 0
    base, dimensions = _base(found.base_dist)
    return base, dimensions + found.reinterpreted_batch_ndims


def _choices(logits: Tensor, dimensions: int) -> list[Part]:
    """Take apart logits whose last axes before the actions are several choices of one state."""
    if dimensions == 0:
        return [_choice(logits)]
    columns = logits.flatten(-1 - dimensions, -2)
    return [_choice(columns[..., index, :]) for index in range(columns.shape[-2])]


def _columns(*values: Tensor, dimensions: int) -> list[Tensor]:
    """Shape values so that their last axis is the action's dimensions; without it each value is a state of its own."""
    if dimensions > 1:
        return [value.flatten(-dimensions) for value in values]
    return [value if dimensions or value.ndim > 1 else value.reshape(-1, 1) for value in values]


def _squashed(found: td.TransformedDistribution, dimensions: int) -> Gaussian | None:
    """Read tanh or a sigmoid of a Gaussian, with scales before and after it."""
    base, inner = _base(found.base_dist)
    dimensions += inner
    if not isinstance(base, td.Normal):
        return None
    mean, std = base.loc, base.scale
    squashed, log_scale = False, torch.zeros((), dtype=torch.float64)
    for transform in _flat(found.transforms):
        kind = type(transform).__name__.lower()
        if isinstance(transform, td.AffineTransform) and not squashed:
            mean, std = transform.loc + transform.scale * mean, std * torch.as_tensor(transform.scale).abs()
        elif isinstance(transform, td.AffineTransform):
            log_scale = log_scale + torch.as_tensor(transform.scale, dtype=torch.float64).abs().log()
        elif ("tanh" in kind or "sigmoid" in kind) and not squashed:
            squashed = True
            if "sigmoid" in kind:  # a sigmoid is half of tanh at half its argument
                mean, std, log_scale = mean / 2, std / 2, log_scale - torch.log(torch.tensor(2.0, dtype=torch.float64))
        else:
            return None
    return _gaussian(*_columns(mean, std, dimensions=dimensions), squashed=squashed, log_scale=log_scale)


def _flat(transforms: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for transform in transforms:
        if isinstance(transform, td.ComposeTransform):
            flat += _flat(transform.parts)
        elif isinstance(transform, td.IndependentTransform):
            flat += _flat([transform.base_transform])
        else:
            flat.append(transform)
    return flat


def _other(found: td.Distribution, dimensions: int) -> list[Part]:
    if found.has_enumerate_support:
        support = found.enumerate_support(expand=False)
        log_probs = found.log_prob(support).movedim(0, -1)
        return _choices(log_probs, max(dimensions, min(log_probs.ndim - 2, 1)))
    entropy = _entropy(found).detach().double()
    if dimensions > 1:
        entropy = entropy.flatten(-dimensions)
    columns = entropy.shape[-1] if entropy.ndim > 1 or dimensions else 1
    try:
        std: Tensor | None = found.stddev.detach().reshape(-1, columns)
    except NotImplementedError:
        std = None
    return [Other(entropy.reshape(-1, columns), std, _width(found))]


def _entropy(found: td.Distribution) -> Tensor:
    """Return the entropy, from samples with a forked generator where there is no formula for it."""
    try:
        return found.entropy()
    except NotImplementedError:
        with torch.random.fork_rng():
            return -found.log_prob(found.sample(torch.Size([_SAMPLES]))).mean(0)


def _width(found: td.Distribution) -> float | None:
    """Return the width of a bounded support that is the same for every dimension."""
    support = found.support
    low, high = getattr(support, "lower_bound", None), getattr(support, "upper_bound", None)
    if low is None or high is None:
        return None
    width = torch.as_tensor(high, dtype=torch.float64) - torch.as_tensor(low, dtype=torch.float64)
    return float(width.mean()) if bool((width == width.mean()).all()) else None


def _masked(parts: list[Part], mask: Any) -> list[Part]:
    """Forbid the masked actions of every choice."""
    choices = [part for part in parts if isinstance(part, Choice)]
    if not choices or len(choices) != len(parts):
        raise UsageError("mask: expected a distribution over discrete choices. Leave it out for continuous actions.")
    widths = [part.log_probs.shape[-1] for part in choices]
    masks = list(mask) if isinstance(mask, (list, tuple)) else _beside(torch.as_tensor(mask), widths)
    if len(masks) != len(choices) or any(one.shape[-1] != width for one, width in zip(masks, widths, strict=False)):
        raise UsageError(f"mask: expected one column per action, {widths} for the choices of this policy.")
    return [
        Choice(log_probabilities(part.log_probs, torch.as_tensor(one).reshape(-1, width)))
        for part, one, width in zip(choices, masks, widths, strict=True)
    ]


def _beside(mask: Tensor, widths: list[int]) -> list[Tensor]:
    return [mask] if mask.shape[-1] != sum(widths) else list(mask.split_with_sizes(widths, dim=-1))
