"""Recurrent networks: how states pass differences on, how long gradients last, and what the gates do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, final

import torch
from pydantic import Field
from torch import Tensor, nn

from gradtrack.analyzers.base import Analyzer, Snapshot
from gradtrack.diagnose.recurrent import Criticality, judge, label, nonfinite
from gradtrack.diagnose.recurring import Recurring
from gradtrack.errors import UsageError
from gradtrack.measure.cell_dynamics import CellDynamics, pool
from gradtrack.measure.cell_look import CellLook, LookOptions, look_around, look_at
from gradtrack.measure.cells import Step, function_cell
from gradtrack.measure.recorder import RecurrentRecorder, recurrent_modules
from gradtrack.measure.replay import follow
from gradtrack.measure.untouched import offline_steps, untouched
from gradtrack.records import Metric, Panel
from gradtrack.reports import Issue, IssueType, Report

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
        Metric("rnn/effective_memory_length", "Until a third of a gradient is left.", unit="steps"),
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


@final
class RecurrentAnalyzer(Analyzer):
    """Spectra, memory and gates of nn.RNN, nn.LSTM, nn.GRU, their cells, and cells of one's own.

    The states are replayed from the inputs of a step, and the Jacobian J of the state map is taken along them:
    for an LSTM of output and memory together. Then
        spectral radius   max|eig J|, median over time; dense up to 512 dimensions, Arnoldi's method beyond
        m(lag)            root mean square of |J' ... J' v| over random unit v in what is read of the state
        memory            the lag, less one, where m has fallen to m(1)/e; decay rate: exp of the slope of ln m
        Lyapunov          mean logarithm of what a QR decomposition takes out of a frame at each step
        gradient profile  |dL/ds_t| of the loss itself, replayed from the direct gradients at the outputs
    An issue needs more than a radius: m above 1000 or an exponent that gives as much over the horizon (supercritical),
    or m below a thousandth of m(1) at a horizon that was declared (short memory). `spectral_radius` is not that of
    `weight_hh`, which has no eigenvalues in an LSTM or a GRU. Dropout between layers is replayed without.

    References: Vogt et al. 2020 (arXiv:2006.14123), Engelken et al. 2020 (arXiv:2006.02427), Roy and Vetterli 2007.
    Cost: three to eight training steps of an LSTM for each look, live at steps 2, 8, 32, 128, 512 and every 1000th.

    >>> import torch
    >>> from gradtrack import RecurrentAnalyzer
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.LSTM(3, 16, batch_first=True)
    >>> analyzer = RecurrentAnalyzer(model)
    >>> issues, dynamics = analyzer.analyze(
    ...     input_fn=lambda: torch.randn(8, 30, 3), loss_fn=lambda output: output[0][:, -1].square().mean(), steps=3
    ... )
    >>> issues, dynamics.criticality, 0.5 < dynamics.spectral_radius < 0.8, dynamics.censored
    ([], 'SUBCRITICAL', True, False)
    """

    report_type: ClassVar[type[Report]] = RecurrentReport
    needs_whole_parameters: ClassVar[bool] = True
    panels: ClassVar[tuple[Panel, ...]] = (
        Panel(
            title="State dynamics per step",
            section="rnn",
            metrics=("rnn/spectral_radius", "rnn/growth_rate", "rnn/temporal_decay_rate"),
            kind="multi-line",
        ),
        Panel(title="Effective memory (steps)", section="rnn", metrics=("rnn/effective_memory_length",)),
        Panel(
            title="Share of the gradient that reaches the first step",
            section="rnn",
            metrics=("rnn/gradient_first_share",),
            log_scale=True,
        ),
        Panel(title="Effective rank of the hidden states", section="rnn", metrics=("rnn/effective_rank",)),
        Panel(title="Gates", section="rnn", metrics=("rnn/gates/*",), kind="multi-line"),
    )

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        enable_jacobian: bool = True,
        enable_vector_analysis: bool = False,
        optimal_radius: float = 0.9,
        critical_band: float = 0.15,
        track_hidden_states: bool = True,
        horizon: int | None = None,
        step_functions: Mapping[str, tuple[Step, int]] | None = None,
        max_sequences: int = 4,
        max_steps: int = 256,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.optimal_radius, self.critical_band = optimal_radius, critical_band
        self.horizon, self.max_sequences, self.max_steps, self.seed = horizon, max_sequences, max_steps, seed
        self.step_functions = dict(step_functions or {})
        self._options = LookOptions(
            jacobian=enable_jacobian,
            vector=enable_vector_analysis,
            states=track_hidden_states,
            max_steps=max_steps,
        )
        self._recorder: RecurrentRecorder | None = None
        self._notes: list[str] = []
        self._history = Recurring()

    @classmethod
    def suits(cls, model: nn.Module) -> str | None:
        found = recurrent_modules(model)
        kinds = sorted({type(model.get_submodule(name)).__name__ for name in found})
        return f"the model has {len(found)} recurrent modules ({', '.join(kinds)})" if found else None

    def arm(self, model: nn.Module) -> None:
        self.disarm()
        self._recorder = self._record(model)

    def inspect(self, snapshot: Snapshot) -> RecurrentReport | None:
        if self._recorder is None:
            return None
        # Beside a training fewer probes do, and large states' eigenvalues come from Arnoldi's method, at a tenth.
        options = replace(self._options, dense_limit=256, num_probes=4, num_exponents=2, radius_budget=128)
        looks = look_around(self._recorder, snapshot.model, options, self.seed)
        if not looks:
            return None
        report = self._report([looks], snapshot.horizon or self.horizon, snapshot.step)
        self._history.add(report.issues)
        return report

    def disarm(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def notes(self) -> list[str]:
        return list(self._notes)

    def issues(self) -> list[Issue]:
        return self._history.issues()

    def state_dict(self) -> dict[str, Any]:
        return self._history.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._history.load_state_dict(state)

    def analyze(
        self,
        input_fn: Callable[[], Any],
        loss_fn: Callable[[Any], Tensor],
        steps: int = 20,
        optimizer: Any = None,
    ) -> tuple[list[Issue], RecurrentReport]:
        """Look at the model on several batches; return the issues and the dynamics.

        The model, its gradients and the random generators are as before, unless an optimizer is passed to train with.
        """
        model = self.model
        if model is None:
            raise UsageError("analyze: this analyzer has no model. Give one: RecurrentAnalyzer(model).")
        found: list[dict[str, CellLook]] = []
        with untouched(model, optimizer):
            recorder = self._record(model)
            try:
                for _ in offline_steps(model, input_fn, loss_fn, steps, optimizer):
                    found.append(look_around(recorder, model, self._options, self.seed))
                    recorder.close()
                    recorder = self._record(model)
            finally:
                recorder.close()
        if not any(found):
            raise UsageError(
                f"model {type(model).__name__} ran no recurrent module: expected nn.RNN, nn.LSTM, nn.GRU, one of their "
                "cells, or a module (x, h) -> h. Give the state equation of any other with step_functions."
            )
        report = self._report(found, self.horizon)
        return report.issues, report

    def analyze_step(self, step: Step, state: Tensor, inputs: Tensor) -> tuple[list[Issue], RecurrentReport]:
        """Look at a state equation `step(states, inputs) -> states` from states (B, S) over inputs (T, B, I)."""
        path = follow(function_cell("step", step, state.shape[-1]), state.detach(), inputs.detach())
        look = look_at(path, None, self._options, torch.Generator().manual_seed(self.seed))
        report = self._report([{"step": look}], self.horizon)
        return report.issues, report

    def print_summary(self, issues: Sequence[Issue], dynamics: RecurrentReport) -> None:
        """Print the dynamics of every cell and the issues."""
        print(summarise(issues, dynamics))  # noqa: T201

    def _record(self, model: nn.Module) -> RecurrentRecorder:
        return RecurrentRecorder(
            model,
            max_sequences=self.max_sequences,
            max_steps=self.max_steps,
            step_functions=self.step_functions,
        )

    def _report(self, found: Sequence[Mapping[str, CellLook]], horizon: int | None, step: int = 0) -> RecurrentReport:
        every: dict[str, list[CellLook]] = {}
        for looks in found:
            for name, look in looks.items():
                every.setdefault(name, []).append(look)
        finite = {name: [look for look in looks if look.finite] for name, looks in every.items()}
        cells = {name: pool(looks) for name, looks in finite.items() if looks}
        broken = [nonfinite(name, step) for name, looks in every.items() if len(finite[name]) < len(looks)]
        issues = [*broken, *judge(cells, horizon, step)]
        self._notes = _notes(cells, horizon, [name for name, looks in every.items() if looks[0].dropout])
        return RecurrentReport(
            num_looks=len(found),
            horizon=horizon,
            criticality=self._criticality(cells, issues),
            cells=cells,
            issues=issues,
            notes=self._notes,
            **_largest(cells),
        )

    def _criticality(self, cells: Mapping[str, CellDynamics], issues: Sequence[Issue]) -> Criticality | None:
        types = {issue.issue_type for issue in issues}
        growths = [cell.growth_rate for cell in cells.values() if cell.growth_rate is not None]
        if not growths:
            return None
        if IssueType.SUPERCRITICAL in types:
            return "SUPERCRITICAL"
        return "SUBCRITICAL" if IssueType.SHORT_MEMORY in types else self._label(max(growths))

    def _label(self, growth: float) -> Criticality:
        return label(growth, self.optimal_radius, self.critical_band)


def summarise(issues: Sequence[Issue], dynamics: RecurrentReport) -> str:
    """Return the dynamics of every cell and the issues as text."""
    lines = [f"Recurrent dynamics over {dynamics.num_looks} batches: {dynamics.criticality or 'not measured'}"]
    for name, cell in dynamics.cells.items():
        parts = [f"{cell.window} steps x {cell.num_sequences} sequences"]
        if cell.spectral_radius is not None:
            parts.append(f"spectral radius {cell.spectral_radius:.4g}")
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


def _largest(cells: Mapping[str, CellDynamics]) -> dict[str, Any]:
    """Return the plain numbers: each the largest over layers and directions."""
    radii = [cell.spectral_radius for cell in cells.values() if cell.spectral_radius is not None]
    rates = [cell.temporal_decay_rate for cell in cells.values() if cell.temporal_decay_rate is not None]
    longest = max(
        (cell for cell in cells.values() if cell.effective_memory_length is not None),
        key=lambda cell: (cell.effective_memory_length, cell.censored),
        default=None,
    )
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


def _notes(cells: Mapping[str, CellDynamics], horizon: int | None, dropped: Sequence[str]) -> list[str]:
    found = []
    known = [cell.effective_memory_length for cell in cells.values() if cell.effective_memory_length is not None]
    if horizon is None and known:
        found.append(
            f"recurrent: gradients fall to a third within {max(known):.3g} steps. That is no fault by itself; "
            "declare a horizon to have it judged."
        )
    if dropped:
        found.append(f"recurrent: dropout between the layers of {', '.join(dropped)} was replayed without.")
    return found
