"""The analyzer of recurrent networks: growth of differences between states, memory of gradients, and gates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor, nn

from gradtrack import registry
from gradtrack.analyzers.base import Analyzer, Picture, Snapshot, check_count, check_horizon, model_of, panel
from gradtrack.analyzers.recurrent.cells import Step, function_cell
from gradtrack.analyzers.recurrent.measure import CellLook, LookOptions, look_around, look_at
from gradtrack.analyzers.recurrent.picture import pictures_of
from gradtrack.analyzers.recurrent.recorder import (
    RecurrentRecorder,
    check_names,
    read_step_functions,
    recurrent_modules,
)
from gradtrack.analyzers.recurrent.report import RecurrentReport, largest, pool, remarks, summarise
from gradtrack.analyzers.recurrent.trajectories import follow
from gradtrack.analyzers.recurrent.verdict import EXPLAINED_BY, criticality, judge
from gradtrack.analyzers.tools.issue_memory import RecurringIssues
from gradtrack.analyzers.tools.modules import kind_of
from gradtrack.analyzers.tools.offline import InputFunction, LossFunction, offline_steps, untouched
from gradtrack.errors import UsageError
from gradtrack.records import Panel
from gradtrack.reports import Issue, IssueType, Report
from gradtrack.support.interrupts import Changes

_NOTHING: Final = (
    "expected nn.RNN, nn.LSTM, nn.GRU, one of their cells, or a module that is called with the state that it returned. "
    "Put the body of a loop over time into such a module, or give its state equation with step_functions."
)
_LIVE: Final[dict[str, Any]] = {
    "dense_limit": 128,
    "num_probes": 2,
    "num_exponents": 2,
    "radius_work": 5_000_000,
    "least_states": 7,
}
"""Limits of a look beside a training: fewer probes, and Arnoldi's method to 1e-3 at a third of the cost."""
_HARMLESS: Final = (IssueType.SHORT_MEMORY, IssueType.LOW_EFFECTIVE_RANK)


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
    or m below a thousandth of m(1) at a horizon that was declared (short memory). Where the loss of a training has
    halved all the same, what it remembers is enough. `spectral_radius` is not that of
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
    explained_by: ClassVar[Mapping[IssueType, tuple[IssueType, ...]]] = EXPLAINED_BY
    needs_whole_parameters: ClassVar[bool] = True
    panels: ClassVar[tuple[Panel, ...]] = (
        panel("State dynamics per step", "rnn/spectral_radius", "rnn/growth_rate", "rnn/temporal_decay_rate"),
        panel("Lyapunov exponent (nats per step)", "rnn/lyapunov_exponent"),
        panel("Effective memory (steps)", "rnn/effective_memory_length"),
        panel("Share of the gradient that reaches the first step", "rnn/gradient_first_share", log_scale=True),
        panel("Effective rank of the hidden states", "rnn/effective_rank"),
        panel("Gates", "rnn/gates/*"),
    )
    picture = Picture("recurrent_spectrum", "eigenvalues on the unit circle, decay back in time")
    pictures = staticmethod(pictures_of)

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
        step_functions: Mapping[str, tuple[Callable[..., Tensor] | str, int]] | None = None,
        max_sequences: int = 4,
        max_steps: int = 256,
        num_exponents: int | None = None,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.optimal_radius, self.critical_band = optimal_radius, critical_band
        self.horizon = check_horizon(horizon)
        self.max_sequences = check_count("max_sequences", max_sequences, "sequences", "The default is 4.")
        self.max_steps = check_count("max_steps", max_steps, "time steps", "The default is 256.")
        self.seed, self._live = seed, dict(_LIVE)
        self.step_functions = read_step_functions(step_functions)
        if model is not None:
            self.check(model)
        self._options = LookOptions(
            jacobian=enable_jacobian,
            vector=enable_vector_analysis,
            states=track_hidden_states,
            max_steps=self.max_steps,
        )
        if num_exponents is not None:
            remedy = "Leave it out for four offline and two live."
            wanted = check_count("num_exponents", num_exponents, "Lyapunov exponents", remedy)
            self._options = replace(self._options, num_exponents=wanted)
            self._live["num_exponents"] = wanted
        self._changes = Changes()
        self._recorder: RecurrentRecorder | None = None
        self._notes: list[str] = []
        self._limitation: str | None = None
        self._history = RecurringIssues(_HARMLESS)

    @classmethod
    def suits(cls, model: nn.Module) -> str | None:
        found = recurrent_modules(model)
        kinds = sorted({kind_of(model.get_submodule(name)).__name__ for name in found})
        return f"the model has {len(found)} recurrent modules ({', '.join(kinds)})" if found else None

    def check(self, model: nn.Module) -> None:
        check_names(model, self.step_functions)

    def arm(self, model: nn.Module) -> None:
        self.disarm()
        self._recorder = self._record(model, self._changes)

    def inspect(self, snapshot: Snapshot) -> RecurrentReport | None:
        if self._recorder is None:
            return None
        looks = look_around(self._recorder, snapshot.model, replace(self._options, **self._live), self.seed)
        if not looks:
            self._notes, self._limitation = [], f"the step ran no recurrent module: {_NOTHING}"
            return None
        self._limitation = None
        report = self._report([looks], snapshot.horizon or self.horizon, snapshot.step)
        self._history.add(report.issues, snapshot.series)
        return report

    def disarm(self) -> None:
        self._changes.undo()
        self._recorder = None

    def notes(self) -> list[str]:
        return list(self._notes)

    def limitation(self) -> str | None:
        return self._limitation

    def issues(self) -> list[Issue]:
        return self._history.issues()

    def state_dict(self) -> dict[str, Any]:
        return self._history.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._history.load_state_dict(state)

    def analyze(
        self, input_fn: InputFunction, loss_fn: LossFunction, steps: int = 20, optimizer: Any = None
    ) -> tuple[list[Issue], RecurrentReport]:
        """Look at the model on several batches; return the issues and the dynamics.

        The issues are those of the dynamics, then those of the gradient flow on as many batches of its own. The model,
        its gradients and the random generators are as before, unless an optimizer is passed to train with.
        """
        report = self.analyze_dynamics(input_fn, loss_fn, steps, optimizer)
        known = {issue.key for issue in report.issues}
        flow = registry.analyzers.load("flow")(self.model).analyze(input_fn, loss_fn, steps)
        return [*report.issues, *(issue for issue in flow if issue.key not in known)], report

    def analyze_dynamics(
        self, input_fn: InputFunction, loss_fn: LossFunction, steps: int = 20, optimizer: Any = None
    ) -> RecurrentReport:
        """Return what `analyze` finds of the dynamics, without its look at the gradient flow."""
        model = model_of(self, self.model)
        options = replace(self._options, radius_work=self._options.radius_work / max(steps, 1))
        found: list[dict[str, CellLook]] = []
        with untouched(model, optimizer), Changes() as changes:
            recorder = self._record(model, changes)
            for _ in offline_steps(model, input_fn, loss_fn, steps, optimizer):
                found.append(look_around(recorder, model, options, self.seed))
                changes.undo()
                recorder = self._record(model, changes)
        if not any(found):
            raise UsageError(f"model {type(model).__name__} ran no recurrent module: {_NOTHING}")
        return self._report(found, self.horizon)

    def analyze_step(self, step: Step, state: Tensor, inputs: Tensor) -> tuple[list[Issue], RecurrentReport]:
        """Look at a state equation `step(states, inputs) -> states` from states (B, S) over inputs (T, B, I)."""
        path = follow(function_cell("step", step, state.shape[-1]), state.detach(), inputs.detach())
        look = look_at(path, None, self._options, torch.Generator().manual_seed(self.seed))
        report = self._report([{"step": look}], self.horizon)
        return report.issues, report

    def print_summary(self, issues: Sequence[Issue], dynamics: RecurrentReport) -> None:
        """Print the dynamics of every cell and the issues."""
        print(summarise(issues, dynamics))  # noqa: T201

    def _record(self, model: nn.Module, changes: Changes) -> RecurrentRecorder:
        return RecurrentRecorder(
            model,
            changes,
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
        broken = [name for name, looks in every.items() if len(finite[name]) < len(looks)]
        issues, numbers = judge(cells, horizon, broken=broken, step=step), largest(cells)
        self._notes = remarks(cells, horizon, [name for name, looks in every.items() if looks[0].dropout])
        return RecurrentReport(
            num_looks=len(found),
            horizon=horizon,
            criticality=criticality(numbers["growth_rate"], issues, self.optimal_radius, self.critical_band),
            cells=cells,
            issues=issues,
            notes=self._notes,
            **numbers,
        )
