"""The report on the dynamics of a model's recurrent parts, and its text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from pydantic import Field

from gradtrack.analyzers.recurrent.report import CellDynamics
from gradtrack.analyzers.recurrent.verdict import Criticality
from gradtrack.records import Metric
from gradtrack.reports import Issue, Report

_MOST_CELLS: Final = 8


class RecurrentReport(Report):
    """The dynamics of a model's recurrent parts. The plain numbers are the largest over layers and directions.

    `spectral_radius` is that of the state Jacobian, median over time. `effective_memory_length` is in steps, `censored`
    where it is longer than what was seen. `criticality` is a label: what the issues say, and where they say nothing,
    where the growth per step lies in the band around the optimal radius.
    """

    num_looks: int = 1
    horizon: int | None = None
    spectral_radius: float | None = None
    criticality: Criticality | None = None
    effective_memory_length: float | None = None
    censored: bool = False
    asymptotic_memory_length: float | None = None
    temporal_decay_rate: float | None = None
    lyapunov_exponent: float | None = None
    growth_rate: float | None = None
    cells: dict[str, CellDynamics] = Field(default_factory=dict)
    issues: list[Issue] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    @property
    def effective_rank(self) -> float | None:
        """Return the effective rank of the hidden states, of the cell where it is the smallest."""
        return min(
            (cell.effective_rank for cell in self.cells.values() if cell.effective_rank is not None), default=None
        )

    described: ClassVar[tuple[Metric, ...]] = (
        Metric("rnn/spectral_radius", "Largest eigenvalue of the state Jacobian by magnitude, median over time."),
        Metric("rnn/growth_rate", "Growth of a difference of states in the long run.", unit="factor per step"),
        Metric("rnn/temporal_decay_rate", "Decay of a gradient on its way back.", unit="factor per step"),
        Metric(
            "rnn/effective_memory_length", "From the first step back until 1/e of a gradient is left.", unit="steps"
        ),
        Metric("rnn/lyapunov_exponent", "The logarithm of the growth rate.", unit="nats per step"),
        Metric("rnn/effective_rank", "What the hidden states fill, smallest cell.", unit="dimensions"),
        Metric("rnn/gradient_first_share", "What reaches the first step of the largest gradient.", unit="share"),
        Metric("rnn/gates/<gate>/<cell>", "Mean opening of one gate.", unit="share", when="LSTM or GRU"),
        Metric("rnn/spectral_radius/<cell>", "Spectral radius of one layer and direction.", when="several cells"),
        Metric("rnn/effective_memory_length/<cell>", "Memory of one cell.", unit="steps", when="several cells"),
        Metric("rnn/divergence/<cell>", "Divergence of the field of state changes.", when="enable_vector_analysis"),
        Metric(
            "rnn/rotation/<cell>", "Antisymmetric share of its Jacobian.", unit="share", when="enable_vector_analysis"
        ),
        Metric("rnn/coherence/<cell>", "Cosine between successive state changes.", when="enable_vector_analysis"),
    )

    def metrics(self) -> dict[str, float]:
        """Return what is known of the whole and of the first cells, under `rnn/`."""
        found = {f"rnn/{name}": getattr(self, name) for name in _METRICS}
        shares = [cell.first_step_share for cell in self.cells.values() if cell.first_step_share is not None]
        found["rnn/gradient_first_share"] = max(shares, default=None)
        for name, cell in list(self.cells.items())[:_MOST_CELLS]:
            found |= {f"rnn/gates/{gate}/{name or 'cell'}": value.mean for gate, value in cell.gates.items()}
            if len(self.cells) > 1:
                found[f"rnn/spectral_radius/{name}"] = cell.spectral_radius
                found[f"rnn/effective_memory_length/{name}"] = cell.effective_memory_length
            if cell.state_field is not None:
                found |= {f"rnn/{key}/{name or 'cell'}": value for key, value in cell.state_field.model_dump().items()}
        return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


_METRICS: Final = (
    "spectral_radius",
    "growth_rate",
    "temporal_decay_rate",
    "effective_memory_length",
    "lyapunov_exponent",
    "effective_rank",
)


def summarise(issues: Sequence[Issue], dynamics: RecurrentReport) -> str:
    """Return the dynamics of every cell and the issues as text."""
    lines = [f"Recurrent dynamics over {dynamics.num_looks} batches: {dynamics.criticality or 'not measured'}"]
    for name, cell in dynamics.cells.items():
        parts = [f"{cell.window} steps x {cell.num_sequences} sequences"]
        if cell.spectral_radius is not None:
            found = "" if cell.has_all_eigenvalues else f" (by Arnoldi's method, {cell.state_size} eigenvalues)"
            parts.append(f"spectral radius {cell.spectral_radius:.4g}{found}")
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
    radii = [cell.spectral_radius for cell in cells.values() if cell.spectral_radius is not None]
    rates = [cell.temporal_decay_rate for cell in cells.values() if cell.temporal_decay_rate is not None]
    longest = _longest(cells)
    exponent = max((cell.lyapunov_exponents[0] for cell in cells.values() if cell.lyapunov_exponents), default=None)
    return {
        "spectral_radius": max(radii, default=None),
        "temporal_decay_rate": max(rates, default=None),
        "effective_memory_length": longest.effective_memory_length if longest else None,
        "censored": bool(longest and longest.censored),
        "asymptotic_memory_length": longest.asymptotic_memory_length if longest else None,
        "lyapunov_exponent": exponent,
        "growth_rate": None if exponent is None else math.exp(exponent),
    }


def _longest(cells: Mapping[str, CellDynamics]) -> CellDynamics | None:
    """Return the cell with the longest memory."""
    known = [cell for cell in cells.values() if cell.effective_memory_length is not None]
    return max(known, key=lambda cell: (cell.effective_memory_length, cell.censored), default=None)


def remarks(cells: Mapping[str, CellDynamics], horizon: int | None, dropped: Sequence[str]) -> list[str]:
    """Say what is good to know about the dynamics without being a fault."""
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
