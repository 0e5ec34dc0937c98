"""One observation of a policy: the numbers that its action distribution comes down to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from gradtrack.analyzers.rl_policy.distributions import Choice, Gaussian, Other, Part
from gradtrack.analyzers.rl_policy.entropy import (
    categorical_entropy,
    choice_information,
    effective_range,
    gaussian_information,
    marginal_entropy,
    normal_entropy,
    tanh_normal_entropy,
)
from gradtrack.errors import InputTypeError, UsageError


def measure_policy(parts: Sequence[Part], *, action_range: Any = None, marginals: bool = True) -> dict[str, Tensor]:
    """Return the numbers of one observation as scalars on the policy's device; what cannot be told is left out."""
    with torch.no_grad():
        choices = [part for part in parts if isinstance(part, Choice)]
        values = _discrete(choices, marginals) if choices else {}
        return {
            **values,
            **_continuous([part for part in parts if not isinstance(part, Choice)], action_range, marginals),
        }


def _discrete(choices: Sequence[Choice], marginals: bool) -> dict[str, Tensor]:
    pairs = [categorical_entropy(choice.log_probs) for choice in choices]
    entropy, largest = (torch.stack(column, dim=-1) for column in zip(*pairs, strict=True))
    total, possible = entropy.sum(-1), largest.sum(-1)
    alive = torch.stack([(choice.log_probs != -math.inf).any(-1) for choice in choices]).all(0)
    shares = torch.where(largest > 0, entropy / largest, math.nan)
    values = {
        "discrete_entropy_mean": (total * alive).sum() / alive.sum(),
        "discrete_entropy_normalized": torch.where(possible > 0, total / possible, math.nan).nanmean(),
        "discrete_entropy_min": torch.nanmean(shares, dim=0).nan_to_num(nan=math.inf).amin(),
        "num_states": alive.sum(),
    }
    if marginals:
        found = [marginal_entropy(choice.log_probs) for choice in choices]
        marginal, limit = (torch.stack(column).sum() for column in zip(*found, strict=True))
        if len(choices) > 1:  # what they tell together is less than the sum
            told = choice_information([choice.log_probs for choice in choices])
            marginal = values["discrete_entropy_mean"] + told
        values["marginal_entropy"] = marginal
        values["marginal_entropy_normalized"] = marginal / limit if limit > 0 else torch.tensor(math.nan)
    return values


def _continuous(parts: Sequence[Part], action_range: Any, marginals: bool) -> dict[str, Tensor]:
    tables = [_dimensions(part, action_range) for part in parts]
    if not tables:
        return {}
    values = {"continuous_entropy_mean": sum((table["entropy"].sum(-1).mean() for table in tables), torch.zeros(()))}
    stds = [table["std"].mean(0) for table in tables if "std" in table]
    if stds:
        flat = torch.cat(stds)
        values |= {"continuous_std_mean": flat.mean(), "continuous_std_min": flat.amin()}
    for name in ("range", "relative_std"):
        known = [table[name] for table in tables if name in table]
        if known:
            flat = torch.cat(known)
            values |= {f"continuous_{name}_mean": flat.mean(), f"continuous_{name}_min": flat.amin()}
    gaussians = [part for part in parts if isinstance(part, Gaussian) and part.joint_entropy is None]
    if marginals and len(gaussians) == len(parts):
        mean, std = (
            torch.cat([getattr(part, name).double() for part in gaussians], dim=-1) for name in ("mean", "std")
        )
        values["continuous_marginal_entropy"] = values["continuous_entropy_mean"] + gaussian_information(mean, std)
    values["num_states"] = torch.tensor(float(len(tables[0]["entropy"])))
    if any(isinstance(part, Gaussian) and part.squashed for part in parts):
        values["squashed"] = torch.ones(())
    return values


def _dimensions(part: Part, action_range: Any) -> Mapping[str, Tensor]:
    """Return the columns of one continuous part: entropy by state, the share of its range by dimension, and more."""
    if isinstance(part, Other):
        return _of_other(part, action_range)
    assert isinstance(part, Gaussian)
    table = {"std": part.std.double(), "entropy": normal_entropy(part.std)}
    if part.squashed:
        scale = torch.zeros(()) if part.log_scale is None else part.log_scale.to(part.std.device)
        squashed = tanh_normal_entropy(part.mean, part.std)
        table["entropy"] = squashed + scale
        table["range"] = squashed.mean(0).exp() / 2
    elif part.joint_entropy is not None:
        table["entropy"] = part.joint_entropy.double().unsqueeze(-1)
    bounded = _bounded(part.std, action_range)
    if bounded is not None and not part.squashed:
        std, width = bounded
        table["range"] = effective_range(std, width).mean(0)
        table["relative_std"] = (std.double() / (width / 2)).mean(0)
    return table


def _of_other(part: Other, action_range: Any) -> Mapping[str, Tensor]:
    table = {"entropy": part.entropy}
    if part.std is not None:
        table["std"] = part.std.double()
    bounded = _bounded(part.entropy, action_range)
    if part.width is not None and bounded is None:
        bounded = part.entropy, torch.tensor(part.width, dtype=torch.float64)
    if bounded is not None:
        entropy, width = bounded
        table["range"] = (entropy.mean(0).exp() / width).clamp_max(1.0)
    return table


def _bounded(values: Tensor, action_range: Any) -> tuple[Tensor, Tensor] | None:
    """Return the columns of the dimensions whose range has two ends, with its width; None where there are none."""
    if action_range is None:
        return None
    try:
        low, high = action_range
    except (TypeError, ValueError):
        raise UsageError(f"action_range {action_range!r}: expected (low, high).") from None
    low, high = (torch.as_tensor(limit, dtype=torch.float64).cpu() for limit in (low, high))
    width: Tensor = high - low
    if bool((width < 0).any()):
        raise UsageError(f"action_range {action_range!r}: expected no low above its high.")
    width = width.expand(values.shape[-1])
    kept = torch.nonzero(width.isfinite() & (width > 0)).flatten()
    if not len(kept):
        return None
    return values[..., kept.to(values.device)], width[kept].to(values.device)


_DOUBTS: Final = {
    "nonfinite": "some logits, means or deviations of the policy are NaN or infinite; numbers are left out that they "
    "reach, or rest on the other states. Look at the loss and the gradients of this step.",
    "no_deviation": "some deviations of the policy are not above 0. Pass log_std.exp() for log_std.",
    "probabilities": "the logits are not negative and add up to 1 in every state, as probabilities do. Pass the log of "
    "probabilities, or Categorical(probs=...).",
}
_ROUNDING: Final = 1e-3


def doubts_about(source: Any, parts: Sequence[Part]) -> dict[str, Tensor]:
    """Return what may be wrong with a distribution as scalars on its device, above 0 where it is."""
    found = []
    for part in parts:
        limit = math.nan if isinstance(part, Choice) else math.inf  # ln of the chance of a forbidden action is infinite
        found += [("nonfinite", (values.isnan() | (values.abs() == limit)).any()) for values in _columns_of(part)]
        if isinstance(part, Gaussian):
            found.append(("no_deviation", (part.std <= 0).any()))
    for logits in source if isinstance(source, list) else [source]:
        if isinstance(logits, Tensor) and logits.numel() and logits.shape[-1] > 1:
            rows = logits.detach().double()
            found.append(("probabilities", (rows >= 0).all() & ((rows.sum(-1) - 1).abs() < _ROUNDING).all()))
    return {name: torch.stack([one for key, one in found if key == name]).any() for name, _ in found}


def remarks(samples: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a note for each doubt about some samples."""
    return [f"rl_policy: {text}" for name, text in _DOUBTS.items() if any(sample.get(name) for sample in samples)]


def read_return(value: Any) -> float | None:
    """Return an episode return as a number, or refuse what is none."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputTypeError(
            f"episode_return {type(value).__name__}: expected a number. Pass the mean over recent episodes."
        ) from None


def read_log_ratio(values: Any, parts: Sequence[Part]) -> Tensor:
    """Return ln(new/old) of the actions taken, one for each state or for each part of its action."""
    ratios, count = _numbers("log_ratio", values), len(_columns_of(parts[0])[0])
    if count not in (ratios.numel(), ratios.shape[:-1].numel() if ratios.ndim > 1 else ratios.numel()):
        raise UsageError(
            f"log_ratio of shape {tuple(ratios.shape)}: expected one for each of the {count} states of the "
            "distribution. Pass the ratios of the same minibatch."
        )
    return ratios


def read_critic(values: Any, returns: Any) -> tuple[Tensor, Tensor]:
    """Return what the critic says and what came of it, state by state."""
    said, came = _numbers("values", values), _numbers("returns", returns)
    if said.numel() != came.numel():
        raise UsageError(
            f"values of shape {tuple(said.shape)}, returns of shape {tuple(came.shape)}: expected as many of both. "
            "Pass those of the same states."
        )
    return said, came


def _columns_of(part: Part) -> tuple[Tensor, ...]:
    """Return the tensors (states, columns) of a part."""
    if isinstance(part, Choice):
        return (part.log_probs,)
    return (part.mean, part.std) if isinstance(part, Gaussian) else (part.entropy,)


def _numbers(name: str, values: Any) -> Tensor:
    try:
        return torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError):
        raise InputTypeError(
            f"{name} {type(values).__name__}: expected a tensor of numbers, one for each state."
        ) from None
