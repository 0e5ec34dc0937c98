"""The report on the dynamics of one recurrent cell, summed up over several looks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TypeVar

import torch
from pydantic import Field

from gradtrack.analyzers.recurrent.dynamics import Decay, asymptotic_memory, decay_rate, effective_memory
from gradtrack.analyzers.recurrent.measure import CellLook, GateStatistics, StateField
from gradtrack.reports import Report
from gradtrack.reports.base import measured
from gradtrack.support.statistics import median

_Found = TypeVar("_Found", bound=Report)


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
    def lyapunov_exponent(self) -> float | None:
        """Return the first Lyapunov exponent."""
        return self.lyapunov_exponents[0] if self.lyapunov_exponents else None

    @property
    def growth_rate(self) -> float | None:
        """Return the long-run factor per step: exp of the first Lyapunov exponent."""
        return None if self.lyapunov_exponent is None else math.exp(self.lyapunov_exponent)

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
    names = dict.fromkeys(name for look in looks for name in look.numbers)
    numbers = {name: median(look.numbers[name] for look in looks if name in look.numbers) for name in names}
    fields = [look.state_field for look in looks if look.state_field is not None]
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
        gradient_profile=_by_lag(fmean, [look.gradient_profile for look in looks if look.gradient_profile]),
        gates={name: _mean([look.gates[name] for look in looks]) for name in last.gates},
        state_field=_mean(fields) if fields else None,
        **numbers,
        **_pooled_decay([look.decay for look in looks if look.decay is not None]),
    )


def _pooled_decay(decays: list[Decay]) -> dict[str, object]:
    if not decays:
        return {}
    log_profile = _by_lag(_log_mean_square, [decay.log_profile.tolist() for decay in decays])
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


def _by_lag(pool: Callable[[list[float]], float], profiles: Sequence[list[float]]) -> list[float]:
    """Pool profiles lag by lag, up to their median length."""
    length = int(statistics.median(map(len, profiles))) if profiles else 0
    return [pool([profile[lag] for profile in profiles if lag < len(profile)]) for lag in range(length)]


def _mean(reports: Sequence[_Found]) -> _Found:
    """Return the means of reports that hold nothing but numbers."""
    kind = type(reports[0])
    return kind(**{name: sum(report[name] for report in reports) / len(reports) for name in kind.__pydantic_fields__})


def _log_mean_square(logs: list[float]) -> float:
    largest = max(logs)
    if not math.isfinite(largest):
        return largest
    return largest + math.log(sum(math.exp(2 * (value - largest)) for value in logs) / len(logs)) / 2
