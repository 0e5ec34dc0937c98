"""The manager: the one stateful coordinator between a training loop and its trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch import Tensor, nn

from gradtrack.analyzers.base import Analyzer
from gradtrack.analyzers.tools.optimizer_hooks import uncompiled
from gradtrack.backends.base import Backend
from gradtrack.config import GradientConfig
from gradtrack.delivery.at_exit import CloseAtExit
from gradtrack.delivery.run import Sink
from gradtrack.delivery.run_files import RunEnd, save_training_log
from gradtrack.errors import ClosedError, InputTypeError, UsageError
from gradtrack.pages import at_close
from gradtrack.reports import Issue, StepReport, TrainingSummary
from gradtrack.step.arguments import as_sequence, check_loss, check_state, is_several, run_backward
from gradtrack.step.data import Outcome
from gradtrack.step.history import History
from gradtrack.step.loss_scale import Scale, unscale
from gradtrack.step.optimizers import BeforeSteps
from gradtrack.step.pair import Pair
from gradtrack.step.pairs import Roster
from gradtrack.step.rows import Rows
from gradtrack.step.unused_settings import IdleSettings

IssueCallback = Callable[[Issue, StepReport], object]
_CLOSED = "this GradientManager is closed: expected an open one. Make a new one for another run."


class GradientManager:
    """Looks at the gradients of each training step once: keeps them safe, reports on them, and records the reports.

    `config` is a `GradientConfig`, a mapping, the path of a YAML, TOML or JSON file, or nothing; keywords override it.
    `process_group` says that the gradients are spread over its ranks, where plain tensors do not say so themselves.
    A manager is a context manager; leaving it delivers what is left. It works until it is closed.
    """

    def __init__(
        self,
        config: GradientConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        backends: Sequence[Any] | None = None,
        analyzers: Sequence[Any] | str | None = None,
        process_group: Any = None,
        **overrides: Any,
    ) -> None:
        if backends is not None:
            overrides["backends"] = list(backends) if is_several(backends) else backends
        if analyzers is not None:
            overrides["analyzers"] = list(analyzers) if is_several(analyzers) else analyzers
        self.config = GradientConfig.load(config, **overrides)
        self._idle = IdleSettings(self.config)
        self._sink = Sink(self.config)
        self._rows, self._history = Rows(self.config, self._sink), History(self.config.max_gradient_history)
        self._roster = Roster(self.config, process_group, history=self._history, on_first=self._sink.prepare)
        self.monitor, self.clipper, self.nan_inf_handler = self._roster.first_components
        self._callbacks: list[IssueCallback] = []
        self._flight: list[StepReport] = []
        self._hooks: list[Any] = []
        self._closed = False
        self._at_exit = CloseAtExit(self, self._sink, self._roster.close)

    def step(
        self,
        model: nn.Module,
        optimizer: Any,
        loss: Tensor | float | None,
        backward: bool = True,
        *,
        scaler: torch.amp.GradScaler | None = None,
        accumulate: bool = False,
        epoch: int | None = None,
        batch: object = None,
    ) -> StepReport:
        """Run the backward pass if asked, then measure, protect and report the gradients, before the optimizer steps.

        With `accumulate=True` the gradients are those of a micro-batch: nothing is measured, clipped or counted yet.
        """
        if torch.compiler.is_dynamo_compiling():  # a loop that is compiled as a whole goes on after a break here
            options = {"scaler": scaler, "accumulate": accumulate, "epoch": epoch, "batch": batch}
            return uncompiled(self.step)(model, optimizer, loss, backward, **options)  # type: ignore[no-any-return]
        if self._closed:
            raise ClosedError(_CLOSED)
        if not (backward and type(loss) is Tensor):  # a backward pass finds out by itself
            check_loss(loss, backward)
        pair = self._roster.find(model, optimizer)
        if backward:
            assert isinstance(loss, Tensor)
            scaled = loss if scaler is None else scaler.scale(loss)
            if pair.analyzers.eager.active:
                with pair.analyzers.eager.backward():
                    run_backward(scaled)
            else:
                run_backward(scaled)
        if scaler is None and not accumulate:
            report = pair.usual.take(loss, epoch, batch)
            if report is not None:
                pair.seen_before_step = True
                return report
        pair.add_loss(loss)
        if accumulate:
            return pair.unmeasured(epoch)
        scale = None if scaler is None else unscale(scaler, pair.optimizers, once=backward)
        pair.seen_before_step = True
        return self._look(pair, scale, epoch=epoch, batch=batch)

    def _look(self, pair: Pair, scale: Scale | None, *, epoch: int | None = None, batch: object = None) -> StepReport:
        """Measure, protect and report the unscaled gradients that a pair has now."""
        if pair.waiting.held is not None:
            self._catch_up(pair)
        outcome = pair.step(scale=scale, epoch=epoch, batch=batch)
        if not outcome.repeated and outcome.pending is None:
            self._conclude(pair, outcome)
        if outcome.error is not None:
            raise outcome.error
        return outcome.report

    def attach(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        horizon: int | None = None,
        name: str | None = None,
        process_group: Any = None,
    ) -> None:
        """Prepare for a model before its first forward pass; needed only for a second pair, which must have a name.

        `horizon` is the number of time steps over which a recurrent model has to remember; `process_group` is for this
        pair what it is for the manager.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        self._roster.attach(model, optimizer, horizon=horizon, name=name or "", process_group=process_group)

    def continue_from(self, step: int, *, name: str = "") -> None:
        """Count the next optimizer step of a pair as the one after `step`, as the framework counts that trains it."""
        if type(step) is not int or step < 0:
            raise UsageError(f"step {step!r}: expected a number of optimizer steps. Pass how many were made.")
        self._catch_up()
        self._roster.named(name).continue_from(step)

    def note(self, text: str, *, name: str = "") -> None:
        """Put something that is good to know into the next report of a pair."""
        self._roster.interrupt()
        self._roster.named(name).coming_notes.append(text)

    def knows(self, model: nn.Module, optimizer: Any) -> bool:
        """Whether a model and what steps it have been seen or attached."""
        return self._roster.has(model, optimizer)

    def analyzer(self, name: str) -> Analyzer:
        """Return a running analyzer, for those that take observations from the training loop."""
        self._roster.interrupt()
        return self._roster.first_analyzers[name]

    def backend(self, name: str) -> Backend:
        """Return a backend by its name."""
        if name not in self._sink.backends:
            there = ", ".join(self._sink.backends) or "none"
            raise UsageError(f"backend {name!r}: expected one of those configured ({there}). Add it to backends.")
        return self._sink.backends[name]

    @property
    def reports(self) -> list[StepReport]:
        """Return the last reports, at most `max_gradient_history`, the newest last."""
        self._roster.settle()
        return list(self._history.reports)

    @property
    def flight_recorder(self) -> list[StepReport]:
        """Return the steps up to the first fault, each with the statistics of every parameter; empty before it."""
        return list(self._flight)

    @property
    def run_dir(self) -> Path | None:
        """Return the directory of the run's files, or None where nothing is written."""
        return self._sink.directory

    def on_issue(self, callback: IssueCallback) -> IssueCallback:
        """Call `callback(issue, report)` whenever an issue opens; it may stop the training by raising."""
        if not callable(callback):
            raise InputTypeError(f"on_issue callback {callback!r}: expected a function of an issue and a report.")
        self._callbacks.append(callback)
        return callback

    def diagnose(self) -> list[Issue]:
        """Return what is wrong with the run so far, in every pair: root causes first, at most a handful."""
        self._catch_up()
        return [issue for pair in self._roster for issue in pair.diagnose()]

    def status(self) -> dict[str, Any]:
        """Tell what was recorded, and for each backend what it has taken and what it has not, and why."""
        return {
            "run_id": self._sink.run_id,
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            "closed": self._closed,
            "steps": {pair.name or "default": pair.step_count for pair in self._roster},
            "journal": self._sink.journal_status(),
            "backends": self._sink.status(),
        }

    def get_training_summary(self) -> TrainingSummary:
        """Sum up the training so far."""
        self._catch_up()
        return self._history.summary()

    def _repr_html_(self) -> str:
        return self.get_training_summary()._repr_html_()

    def save_training_log(self, file_path: str | Path) -> Path:
        """Write the configuration, the summary and the kept reports as JSON."""
        return save_training_log(Path(file_path), self.config, self.get_training_summary(), self.reports)

    def plot_training_curves(self, save_path: str | Path) -> Path:
        """Draw loss, gradient norms, non-finite counts and clipping over time."""
        from gradtrack.pages import pictures

        return pictures.plot_training_curves(self.reports, Path(save_path))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that rolls, as plain data for a checkpoint."""
        self._catch_up()
        return {"version": 1, "pairs": self._roster.state_dict(), "history": self._history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned; pairs that are not there yet get theirs when they are attached."""
        check_state(state)
        self._roster.interrupt()
        self._history.load_state_dict(state["history"])
        self._roster.load_state_dict(state["pairs"])

    def follow(self, model: nn.Module, optimizer: Any) -> None:
        """Look by itself just before the first of the optimizers steps, or after each call of its closure.

        What the loop has shown to `step` itself since the last one is not looked at again.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        optimizers = as_sequence(optimizer)

        def look(loss: Tensor | float | None, scale: Scale | None) -> None:
            pair = self._roster.find(model, optimizers)
            if pair.seen_before_step:
                pair.seen_before_step = False
            elif not self._closed and (scale is not None or pair.usual.take(loss, None, None) is None):
                pair.add_loss(loss)
                self._look(pair, scale)

        self._hooks.append(BeforeSteps(optimizers, look))
        # The optimizer keeps the manager from now on; what is kept until that is collected must not keep the optimizer.
        self._at_exit.unhook = self._roster.models_alone()

    def flush(self) -> None:
        """Make everything that was recorded durable."""
        self._catch_up()
        self._sink.flush()

    def close(self, *, failed: bool = False) -> None:
        """Deliver what is left and take every hook off; a second call does nothing."""
        if self._closed or self._sink.forked:
            return
        self._catch_up()
        self._closed = True
        try:
            for hook in self._hooks:
                hook.remove()
            self._roster.close()
            self._sink.tell_if_empty(self._history.num_steps)
            self._leave_files(failed=failed)
        finally:  # whoever has no patience for the pictures keeps the rows
            self._sink.close(failed=failed)
            self._at_exit.cancel()

    def __enter__(self) -> Self:
        if self._closed:
            raise ClosedError(_CLOSED)
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InputTypeError(
            "a GradientManager cannot be pickled or copied: expected plain data, since it holds files, threads and "
            "hooks. Save manager.state_dict(), and keep the manager out of what is saved or copied."
        )

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        left_on_purpose = isinstance(fault, SystemExit) and fault.code in (None, 0)
        self.close(failed=kind is not None and not left_on_purpose)

    def _catch_up(self, *pairs: Pair) -> None:
        """Keep and record the last steps of pairs that nobody has asked about so far."""
        self._roster.settle()
        for pair in pairs or self._roster:
            outcome = pair.take_late()
            if outcome is not None:
                self._conclude(pair, outcome)

    def _conclude(self, pair: Pair, outcome: Outcome) -> None:
        """Keep and record a step, then tell the callbacks, who may stop the training."""
        report, facts = outcome.report, outcome.facts
        healthy = facts.health.healthy
        self._history.append(
            report,
            size=self.config.max_gradient_history,
            norm=outcome.norm,
            clipped=outcome.clipped,
            skipped=facts.skipped,
            healthy=healthy,
        )
        if "nan_count" in facts.nan_inf:
            self._history.add_nonfinite(facts.nan_inf)
        if self._idle.waits:
            self._idle.step({pair.name: pair.model for pair in self._roster})
        for issue in outcome.issues:
            self._history.add_issue(issue.issue_type.value)
        if not healthy and not self._flight:
            self._flight = pair.flight.read()
        if outcome.event or outcome.late:
            self._rows.send(outcome, pair.analyzers.panels if self._rows.is_new(pair.name) else ())
            self._rows.talk(outcome)
        for issue in outcome.opened:
            for callback in self._callbacks:
                callback(issue, report)

    def _leave_files(self, *, failed: bool) -> None:
        """Write how the run ended, and what the configuration asks for of pictures and a report."""
        config = self.config
        directory = self._sink.claim() if self._history.reports and self._sink.rank == 0 else None
        if directory is None:
            return
        last = [report for pair in self._roster for report in pair.flight.read()[-1:]]
        end = RunEnd(
            run_id=self._sink.run_id,
            summary=self.get_training_summary(),
            failed=failed,
            last=last,
            flight_recorder=self._flight,
        )
        at_close.save_run_end(directory, end)
        left: list[Path] = []
        if config.save_gradient_plots and config.run_dir is not None:
            left += at_close.save_pictures(directory, self.reports, self.monitor.history)
        if config.save_html_report:
            left += at_close.save_page(directory, left)
        at_close.save_names(directory, self._sink.run_id, left)
