"""From observations of a policy to one report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from gradtrack.diagnose.policy_trend import FLOOR, PolicyHistory
from gradtrack.measure.policy_report import PolicyReport

_INFORMED: Final = 0.5
_TOLD: Final = 0.1
_AVERAGED: Final = frozenset(PolicyReport.__pydantic_fields__) - {"num_states", "squashed"}


def sum_up(
    samples: Sequence[dict[str, Tensor]], history: PolicyHistory, returns: Sequence[float | None]
) -> PolicyReport:
    """Average samples by their states, and take each of them into the history."""
    rows = [_floats(sample) for sample in samples]
    levels = [_level(row) for row in rows]
    for level, episode_return in zip(levels, returns, strict=True):
        history.add(level, episode_return)
    values = {name: _weighted(rows, name) for name in dict.fromkeys(name for row in rows for name in row)}
    level = mean_of([level for level in levels[-max(len(levels) // 4, 1) :] if level is not None])
    conditional = values.get("discrete_entropy_mean", values.get("continuous_entropy_mean"))
    marginal = values.pop("continuous_marginal_entropy", None)
    values.setdefault("marginal_entropy", marginal)
    total = values["marginal_entropy"]
    information = None if total is None or conditional is None else max(total - conditional, 0.0)
    spread = values.get("marginal_entropy_normalized")
    alone = "continuous_entropy_mean" not in values  # beside a continuous part, the level may be that of the other
    informed = alone and spread is not None and level is not None and spread - level > _INFORMED * (1 - level)
    history.blind = information is not None and (information < _TOLD if spread is None else spread < 2 * FLOOR)
    known = [found for found in returns if found is not None]
    return PolicyReport(
        **{name: value for name, value in values.items() if name in _AVERAGED},
        squashed=bool(values.get("squashed")),
        continuous_entropy_normalized=values.get("continuous_range_mean"),
        conditional_entropy=conditional,
        state_information=information,
        entropy_level=level,
        entropy_slope=history.slope,
        entropy_collapse_risk=history.risk(level, informed=informed),
        confidence="low" if history.pays is None else "high",
        episode_return=known[-1] if known else None,
        num_observations=len(rows),
        num_states=int(sum(row["num_states"] for row in rows)),
    )


def _level(row: Mapping[str, float]) -> float | None:
    """Return the lowest normalised entropy of a sample's parts; for a Gaussian of unknown range its std, at most 1."""
    parts = [row[name] for name in ("discrete_entropy_normalized", "continuous_range_mean") if name in row]
    if "continuous_range_mean" not in row and "continuous_std_mean" in row:
        parts.append(min(row["continuous_std_mean"], 1.0))
    finite = [part for part in parts if math.isfinite(part)]
    return min(finite) if finite else None


def _floats(sample: Mapping[str, Tensor]) -> dict[str, float]:
    stacked = torch.stack([value.detach().double().reshape(()).cpu() for value in sample.values()])
    return dict(zip(sample, stacked.tolist(), strict=True))


def _weighted(rows: Sequence[Mapping[str, float]], name: str) -> float | None:
    known = [(row[name], row["num_states"]) for row in rows if name in row and math.isfinite(row[name])]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total > 0 else None


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean, or None of nothing."""
    return sum(values) / len(values) if values else None
