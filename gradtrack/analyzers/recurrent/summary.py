"""The report on the dynamics of a model's recurrent parts, and its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from gradtrack.analyzers.recurrent.report import CellDynamics
from gradtrack.analyzers.recurrent.verdict import Criticality
from gradtrack.records import Metric
from gradtrack.reports import Issue, Report
from gradtrack.reports.base import measured

_MOST_CELLS: Final = 8
_OF_SEVERAL: Final = ("spectral_radius", "effective_memory_length")
_Rank = Annotated[
    float | None, Metric("rnn/effective_rank", "What the hidden states fill, smallest cell.", unit="dimensions")
]
_FirstShare = Annotated[
    float | None,
    Metric("rnn/gradient_first_share", "What reaches the first step of the largest gradient.", unit="share"),
]


class RecurrentReport(Report):
    """The dynamics of a model's recurrent parts. The plain numbers are the largest over layers and directions.

    The memory is `censored` where it is longer than what was seen. `criticality` is what the issues say, and where they
    say nothing, where the growth per step lies in the band around the optimal radius.
    """

    num_looks: int = 1
    horizon: int | None = None
    spectral_radius: float | None = measured(
        "rnn/spectral_radius", "Largest eigenvalue of the state Jacobian by magnitude, median over time."
    )
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
    longest = _longest(cells)
    return {
        "spectral_radius": max(_known(cells, "spectral_radius"), default=None),
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
