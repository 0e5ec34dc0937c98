"""The report on the dynamics of one recurrent cell, summed up over several looks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from pydantic import Field

from gradtrack.analyzers.recurrent.dynamics import Decay, asymptotic_memory, decay_rate, effective_memory
from gradtrack.analyzers.recurrent.measure import CellLook, GateStatistics, StateField
from gradtrack.reports import Report
from gradtrack.reports.base import measured
from gradtrack.support.statistics import median


class CellDynamics(Report):
    """The dynamics of one layer and direction, over `num_looks` batches of at most `num_sequences` sequences.

    Numbers are over the last `window` steps of each sequence. `decay_profile[lag]` is what is left of a gradient after
    so many steps back; `gradient_profile[lag]` is the loss gradient at the state so many steps before the end, as a
    share of the largest. `eigenvalues` (real, imaginary) are those of the state Jacobian at one state: all of them
    where it was taken in full, and fewer than `state_size`, the outermost, where Arnoldi's method found them.
    """

    kind: str
    module: str
    state_size: int
    num_looks: int
    num_sequences: int
    window: int
    spectral_radius: float | None = measured(
        "rnn/spectral_radius/<cell>", "Spectral radius of one layer and direction.", when="several cells"
    )
    spectral_radius_range: tuple[float, float] | None = None
    spectral_radius_count: int = 0
    eigenvalues: list[tuple[float, float]] = Field(default_factory=list)
    lyapunov_exponents: list[float] = Field(default_factory=list)
    lyapunov_error: float | None = None
    lyapunov_count: int = 0
    decay_profile: list[float] = Field(default_factory=list)
    temporal_decay_rate: float | None = None
    effective_memory_length: float | None = measured(
        "rnn/effective_memory_length/<cell>", "Memory of one cell.", unit="steps", when="several cells"
    )
    censored: bool = False
    asymptotic_memory_length: float | None = None
    long_memory_length: float | None = None
    long_memory_censored: bool = False
    effective_rank: float | None = None
    participation_ratio: float | None = None
    rank_bound: float | None = None
    weight_gradient_rank: float | None = None
    gradient_profile: list[float] = Field(default_factory=list)
    gates: dict[str, GateStatistics] = Field(default_factory=dict)
    cell_memory_length: float | None = None
    state_field: StateField | None = None

    @property
    def growth_rate(self) -> float | None:
        """Return the long-run factor per step: exp of the first Lyapunov exponent."""
        return math.exp(self.lyapunov_exponents[0]) if self.lyapunov_exponents else None

    @property
    def has_all_eigenvalues(self) -> bool:
        """Whether the eigenvalues are the whole spectrum, and not only the outermost."""
        return len(self.eigenvalues) == self.state_size

    @property
    def first_step_share(self) -> float | None:
        """Return the share of the largest loss gradient that reaches the first step of the window."""
        return self.gradient_profile[-1] if self.gradient_profile else None


def pool(looks: Sequence[CellLook]) -> CellDynamics:
    """Sum up several looks at the same cell."""
    last = looks[-1]
    radii = [radius for look in looks for radius in look.radii]
    return CellDynamics(
        kind=last.kind,
        module=last.module,
        state_size=last.state_size,
        num_looks=len(looks),
        num_sequences=max(look.num_sequences for look in looks),
        window=int(statistics.median(look.window for look in looks)),
        spectral_radius=median(radii),
        spectral_radius_range=(min(radii), max(radii)) if radii else None,
        spectral_radius_count=len(radii),
        eigenvalues=last.eigenvalues,
        effective_rank=median(look.ranks[0] for look in looks if look.ranks),
        participation_ratio=median(look.ranks[1] for look in looks if look.ranks),
        rank_bound=median(look.ranks[2] for look in looks if look.ranks),
        weight_gradient_rank=median(look.weight_rank for look in looks if look.weight_rank is not None),
        gradient_profile=_mean_profile([look.gradient_profile for look in looks if look.gradient_profile]),
        gates=_mean_gates(looks),
        cell_memory_length=median(look.cell_memory for look in looks if look.cell_memory is not None),
        state_field=_mean_field([look.state_field for look in looks if look.state_field is not None]),
        **_pooled_decay([look.decay for look in looks if look.decay is not None]),
    )


def _pooled_decay(decays: list[Decay]) -> dict[str, object]:
    if not decays:
        return {}
    profiles: list[list[float]] = [decay.log_profile.tolist() for decay in decays]
    length = int(statistics.median(len(profile) for profile in profiles))
    log_profile = [
        _log_mean_square([profile[lag] for profile in profiles if lag < len(profile)]) for lag in range(length)
    ]
    weights = torch.tensor([decay.count for decay in decays], dtype=torch.float64)
    count = int(weights.sum())
    exponents = (torch.stack([decay.exponents for decay in decays]) * weights.unsqueeze(1)).sum(dim=0) / count
    error = math.sqrt(sum((decay.error * decay.count) ** 2 for decay in decays)) / count
    short, long = effective_memory(log_profile), effective_memory(log_profile, 1e-3)
    return {
        "lyapunov_exponents": exponents.tolist(),
        "lyapunov_error": error if math.isfinite(error) else None,
        "lyapunov_count": count,
        "decay_profile": [math.exp(value) if value < 700 else math.inf for value in log_profile],
        "temporal_decay_rate": decay_rate(log_profile),
        "effective_memory_length": short.length if short else None,
        "censored": bool(short and short.censored),
        "asymptotic_memory_length": asymptotic_memory(float(exponents[0])),
        "long_memory_length": long.length if long else None,
        "long_memory_censored": bool(long and long.censored),
    }


def _mean_profile(profiles: list[list[float]]) -> list[float]:
    if not profiles:
        return []
    length = int(statistics.median(len(profile) for profile in profiles))
    reaching = [[profile[lag] for profile in profiles if lag < len(profile)] for lag in range(length)]
    return [sum(values) / len(values) for values in reaching]


def _mean_gates(looks: Sequence[CellLook]) -> dict[str, GateStatistics]:
    return {
        name: GateStatistics(
            mean=sum(look.gates[name].mean for look in looks) / len(looks),
            saturated=sum(look.gates[name].saturated for look in looks) / len(looks),
        )
        for name in looks[0].gates
    }


def _mean_field(fields: list[StateField]) -> StateField | None:
    if not fields:
        return None
    names = StateField.__pydantic_fields__
    return StateField(**{name: sum(found[name] for found in fields) / len(fields) for name in names})


def _log_mean_square(logs: list[float]) -> float:
    largest = max(logs)
    if not math.isfinite(largest):
        return largest
    return largest + math.log(sum(math.exp(2 * (value - largest)) for value in logs) / len(logs)) / 2
