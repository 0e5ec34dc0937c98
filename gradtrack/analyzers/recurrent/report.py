"""The report on the dynamics of a model's recurrent parts, summed up over several looks, and its text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any, Final, Literal, TypeVar

import torch
from pydantic import Field

from gradtrack.analyzers.recurrent.dynamics import Decay, asymptotic_memory, decay_rate, effective_memory
from gradtrack.analyzers.recurrent.measure import CellLook, GateStatistics, StateField
from gradtrack.records import Metric
from gradtrack.reports import Issue, Report
from gradtrack.reports.base import measured
from gradtrack.support.statistics import median

Criticality = Literal["SUBCRITICAL", "CRITICAL", "SUPERCRITICAL"]

_Found = TypeVar("_Found", bound=Report)
_MOST_CELLS: Final = 8
_OF_SEVERAL: Final = ("spectral_radius", "effective_memory_length")
_Rank = Annotated[
    float | None, Metric("rnn/effective_rank", "What the hidden states fill, smallest cell.", unit="dimensions")
]
_FirstShare = Annotated[
    float | None,
    Metric("rnn/gradient_first_share", "What reaches the first step of the largest gradient.", unit="share"),
]


class CellDynamics(Report):
    """The dynamics of one layer and direction, over `num_looks` batches of at most `num_sequences` sequences.

    Numbers are over the last `window` steps of each sequence. `decay_profile[lag]` is what is left of a gradient after
    so many steps back; `gradient_profile[lag]` is the loss gradient at the state so many steps before the end, as a
    share of the largest. `eigenvalues` (real, imaginary) are those of the state Jacobian at one state, whose radius is
    nearest to `spectral_radius`, the median over `spectral_radius_count` states: all of them where it was taken in
    full, and fewer than `state_size`, the outermost, where Arnoldi's method found them.
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


class RecurrentReport(Report):
    """The dynamics of a model's recurrent parts. The plain numbers are the largest over layers and directions.

    `spectral_radius_count` is the number of states that `spectral_radius` rests on. The memory is `censored` where it
    is longer than what was seen. `criticality` is what the issues say, and where they say nothing, where the growth per
    step lies in the band around the optimal radius.
    """

    num_looks: int = 1
    horizon: int | None = None
    spectral_radius: float | None = measured(
        "rnn/spectral_radius", "Largest eigenvalue of the state Jacobian by magnitude, median over time."
    )
    spectral_radius_count: int = 0
    criticality: Criticality | None = None
    effective_memory_length: float | None = measured(
        "rnn/effective_memory_length", "From the first step back until 1/e of a gradient is left.", unit="steps"
    )
    censored: bool = False
    asymptotic_memory_length: float | None = None
    temporal_decay_rate: float | None = measured(
        "rnn/temporal_decay_rate", "Decay of a gradient on its way back.", unit="factor per step"
    )
    lyapunov_exponent: float | None = measured(
        "rnn/lyapunov_exponent", "The logarithm of the growth rate.", unit="nats per step"
    )
    growth_rate: float | None = measured(
        "rnn/growth_rate", "Growth of a difference of states in the long run.", unit="factor per step"
    )
    cells: dict[str, CellDynamics] = Field(default_factory=dict)
    issues: list[Issue] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    @property
    def effective_rank(self) -> _Rank:
        """Return the effective rank of the hidden states, of the cell where it is the smallest."""
        return min(_known(self.cells, "effective_rank"), default=None)

    @property
    def gradient_first_share(self) -> _FirstShare:
        """Return the share of the largest loss gradient that reaches the first step, of the cell where most does."""
        return max(_known(self.cells, "first_step_share"), default=None)

    def metric_parts(self) -> Iterator[tuple[str, Report]]:
        """Return the first cells, by name."""
        for name, cell in list(self.cells.items())[:_MOST_CELLS]:
            yield name or "cell", cell

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the model and of its first cells; a single cell does not repeat those of the model."""
        only = {f"rnn/{name}/{cell or 'cell'}" for cell in self.cells for name in _OF_SEVERAL if len(self.cells) == 1}
        return {name: value for name, value in super().metrics().items() if name not in only}


def pool(looks: Sequence[CellLook]) -> CellDynamics:
    """Sum up several looks at the same cell."""
    last = looks[-1]
    radii = [radius for look in looks for radius in look.radii]
    middle = median(radii)
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
        spectral_radius=middle,
        spectral_radius_range=(min(radii), max(radii)) if radii else None,
        spectral_radius_count=len(radii),
        eigenvalues=min((look.eigenvalues for look in looks), key=lambda one: _distance(one, middle)),
        gradient_profile=_by_lag(fmean, [look.gradient_profile for look in looks if look.gradient_profile]),
        gates={name: _mean([look.gates[name] for look in looks]) for name in last.gates},
        state_field=_mean(fields) if fields else None,
        **numbers,
        **_pooled_decay([look.decay for look in looks if look.decay is not None]),
    )


def _distance(eigenvalues: Sequence[tuple[float, float]], radius: float | None) -> float:
    """Return how far the radius of a spectrum is from another radius."""
    if radius is None or not eigenvalues:
        return math.inf
    return abs(max(math.hypot(*one) for one in eigenvalues) - radius)


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


def summarise(issues: Sequence[Issue], dynamics: RecurrentReport) -> str:
    """Return the dynamics of every cell and the issues as text."""
    lines = [f"Recurrent dynamics over {dynamics.num_looks} batches: {dynamics.criticality or 'not measured'}"]
    for name, cell in dynamics.cells.items():
        parts = [f"{cell.window} steps x {cell.num_sequences} sequences"]
        if cell.spectral_radius is not None:
            found = "" if cell.has_all_eigenvalues else f" (by Arnoldi's method, {cell.state_size} eigenvalues)"
            parts.append(f"spectral radius {cell.spectral_radius:.4g} over {cell.spectral_radius_count} states{found}")
        if cell.effective_memory_length is not None:
            parts.append(f"memory {'>= ' if cell.censored else ''}{cell.effective_memory_length:.3g} steps")
        if cell.temporal_decay_rate is not None:
            parts.append(f"decay {cell.temporal_decay_rate:.4g} per step")
        if cell.lyapunov_exponents:
            parts.append(f"Lyapunov exponent {cell.lyapunov_exponents[0]:.4g}")
        if cell.effective_rank is not None:
            parts.append(f"effective rank {cell.effective_rank:.3g}")
        lines.append(f"  {name or cell.kind}: {', '.join(parts)}")
    lines += [f"  {issue}" for issue in issues] or ["  No issues."]
    return "\n".join(lines)


def largest(cells: Mapping[str, CellDynamics]) -> dict[str, Any]:
    """Return the plain numbers: each the largest over layers and directions."""
    longest = _longest(cells)
    radii = [(one.spectral_radius, one.spectral_radius_count) for one in cells.values()]
    radius, count = max((pair for pair in radii if pair[0] is not None), default=(None, 0))
    return {
        "spectral_radius": radius,
        "spectral_radius_count": count,
        "temporal_decay_rate": max(_known(cells, "temporal_decay_rate"), default=None),
        "effective_memory_length": longest.effective_memory_length if longest else None,
        "censored": bool(longest and longest.censored),
        "asymptotic_memory_length": longest.asymptotic_memory_length if longest else None,
        "lyapunov_exponent": max(_known(cells, "lyapunov_exponent"), default=None),
        "growth_rate": max(_known(cells, "growth_rate"), default=None),
    }


def _known(cells: Mapping[str, CellDynamics], name: str) -> list[float]:
    return [value for cell in cells.values() if (value := getattr(cell, name)) is not None]


def _longest(cells: Mapping[str, CellDynamics]) -> CellDynamics | None:
    """Return the cell with the longest memory."""
    known = [cell for cell in cells.values() if cell.effective_memory_length is not None]
    return max(known, key=lambda cell: (cell.effective_memory_length, cell.censored), default=None)


def remarks(cells: Mapping[str, CellDynamics], horizon: int | None, dropped: Sequence[str]) -> list[str]:
    """Return notes on the dynamics that are information, not issues."""
    found = []
    longest = _longest(cells)
    if horizon is None and longest is not None:
        length = f"{longest.effective_memory_length:.3g} steps"
        seen = f"outlast {length}, all that was seen" if longest.censored else f"fall to 1/e within {length}"
        found.append(f"recurrent: gradients {seen}. That is no fault by itself; declare a horizon to have it judged.")
    partial = {name: cell for name, cell in cells.items() if cell.eigenvalues and not cell.has_all_eigenvalues}
    if partial:
        counts = ", ".join(
            f"{name or one.kind}: {len(one.eigenvalues)} of {one.state_size}" for name, one in partial.items()
        )
        found.append(f"recurrent: only the outermost eigenvalues were found, by Arnoldi's method ({counts}).")
    if dropped:
        found.append(f"recurrent: dropout between the layers of {', '.join(dropped)} was replayed without.")
    return found
