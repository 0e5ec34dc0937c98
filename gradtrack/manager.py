"""The manager: the one stateful coordinator between a training loop and its trackers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, SupportsIndex, Unpack

import torch
from torch import Tensor, nn

from gradtrack.analyzers.base import Analyzer
from gradtrack.analyzers.tools.optimizer_hooks import uncompiled
from gradtrack.backends.base import Backend
from gradtrack.config import GradientConfig
from gradtrack.delivery.at_exit import CloseAtExit
from gradtrack.delivery.run import Sink
from gradtrack.delivery.run_files import RUN_END, RunEnd, note_files, save_training_log
from gradtrack.errors import ClosedError, InputTypeError, UsageError
from gradtrack.health.monitor import GradientMonitor
from gradtrack.pages import at_close
from gradtrack.protection.clipping import GradientClipper
from gradtrack.protection.nonfinite import NaNInfHandler
from gradtrack.protection.spikes import Rollback
from gradtrack.reports import Issue, Issues, StepReport, TrainingSummary
from gradtrack.step.arguments import Settings, as_place, as_sequence, check_loss, check_state, is_several, run_backward
from gradtrack.step.history import History
from gradtrack.step.loss_scale import Scale, unscale
from gradtrack.step.optimizers import BeforeSteps, TakeLoss
from gradtrack.step.pair import IssueCallback
from gradtrack.step.pairs import Pairs
from gradtrack.step.rows import Rows
from gradtrack.step.unused_settings import UnusedSettings

_CLOSED = "this GradientManager is closed: expected an open one. Make a new one for another run."


class GradientManager:
    """Looks at the gradients of each training step once: keeps them safe, reports on them, and records the reports.

    `config` is a `GradientConfig`, a mapping, the path of a YAML, TOML or JSON file, or nothing; keywords override it.
    `process_group` says that the gradients are spread over its ranks, where plain tensors do not say so themselves.
    A manager is a context manager; leaving it delivers the remaining records. It works until it is closed.
    """

    def __init__(
        self,
        config: GradientConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        backends: Sequence[Any] | None = None,
        analyzers: Sequence[Any] | str | None = None,
        process_group: Any = None,
        **overrides: Unpack[Settings],
    ) -> None:
        settings: dict[str, Any] = {**overrides}
        for kind, specs in (("backends", backends), ("analyzers", analyzers)):
            if specs is not None:
                settings[kind] = list(specs) if is_several(specs) else specs
        self.config = GradientConfig.load(config, **settings)
        self._unused_settings = UnusedSettings(self.config)
        self._sink = Sink(self.config)
        self._rows, self._history = Rows(self.config, self._sink), History(self.config.max_gradient_history)
        self._callbacks: list[IssueCallback] = [self._sink.post] if self._sink.alerts else []
        self._rollbacks: list[Rollback] = []
        self._pairs = Pairs(
            self.config,
            process_group,
            history=self._history,
            rows=self._rows,
            callbacks=self._callbacks,
            rollbacks=self._rollbacks,
            sink=self._sink,
        )
        self._hooks: list[Any] = []
        self._closed = False
        self._at_exit = CloseAtExit(self, self._sink, self._pairs.close)

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
        step: int | None = None,
        max_grad_norm: float | Mapping[str, float] | None = None,
    ) -> StepReport:
        """Run the backward pass if asked, then measure, protect and report the gradients, before the optimizer steps.

        With `accumulate=True` the gradients are those of a micro-batch: nothing is measured, clipped or counted yet.
        `step` is the place of the row on the trackers' axis, where that counts something else than optimizer steps.
        `max_grad_norm` is the limit of this step alone, in the place of the setting.
        """
        if torch.compiler.is_dynamo_compiling():  # a loop that is compiled as a whole has a graph break here
            options = {"scaler": scaler, "accumulate": accumulate, "epoch": epoch, "batch": batch, "step": step}
            options["max_grad_norm"] = max_grad_norm
            return uncompiled(self.step)(model, optimizer, loss, backward, **options)  # type: ignore[no-any-return]
        if self._closed and not self._at_exit.exiting:
            raise ClosedError(_CLOSED)
        if not (backward and type(loss) is Tensor):  # the backward pass checks a tensor by itself
            check_loss(loss, backward)
        pair = self._pairs.find(model, optimizer)
        limited = None if max_grad_norm is None else pair.clipper.limited_to(max_grad_norm, complete=not accumulate)
        if step is not None:
            self._rows.place(pair.name, pair.step_count + 1, as_place(step))
        if backward:
            assert isinstance(loss, Tensor)
            scaled = loss if scaler is None else scaler.scale(loss)
            if pair.analyzers.armed:
                with pair.analyzers.backward(loss):
                    run_backward(scaled)
            else:
                run_backward(scaled)
        if self._closed:  # a thread that trains on while the interpreter ends has done nothing wrong
            return pair.unmeasured(epoch)
        if accumulate:
            pair.add_loss(loss)
            for recorder in pair.recorders:
                recorder.end_batch(batch)
            return pair.unmeasured(epoch)
        scale = None if scaler is None else unscale(scaler, pair.optimizers, once=backward)
        pair.seen_before_step = True
        if limited is None:
            report = pair.step(loss, scale=scale, epoch=epoch, batch=batch)
        else:
            pair.fast_path.close()
            with limited:
                report = pair.step(loss, scale=scale, epoch=epoch, batch=batch)
        if self._unused_settings.waits:  # for enough steps to tell which settings have no effect
            self._unused_settings.step({pair.name: pair.model for pair in self._pairs})
        return report

    def attach(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        horizon: int | None = None,
        name: str | None = None,
        process_group: Any = None,
    ) -> None:
        """Register a model before its first forward pass; needed only for a second pair, which must have a name.

        `horizon` is the number of time steps over which a recurrent model has to remember; `process_group` is for this
        pair what it is for the manager.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        self._pairs.attach(model, optimizer, horizon=horizon, name=name or "", process_group=process_group)

    def continue_from(self, step: int, *, name: str = "") -> None:
        """Count the next optimizer step of a pair as the one after `step`, as the framework counts that trains it."""
        if type(step) is not int or step < 0:
            raise UsageError(f"step {step!r}: expected a number of optimizer steps. Pass how many were made.")
        self._pairs.settle()
        self._pairs.named(name).continue_from(step)

    def note(self, text: str, *, name: str = "") -> None:
        """Add a note to the next report of a pair."""
        self._pairs.interrupt()
        self._pairs.named(name).coming_notes.append(text)

    def knows(self, model: nn.Module, optimizer: Any) -> bool:
        """Whether a model and its optimizer were passed to `step` or `attach`."""
        return self._pairs.has(model, optimizer)

    @property
    def monitor(self) -> GradientMonitor:
        """Return the monitor of the first pair; each step is applied to it at once from now on."""
        return self._pairs.share_components()[0]

    @property
    def clipper(self) -> GradientClipper:
        """Return the clipper of the first pair; each step is applied to it at once from now on."""
        return self._pairs.share_components()[1]

    @property
    def nan_inf_handler(self) -> NaNInfHandler:
        """Return the handler of non-finite gradients of the first pair."""
        return self._pairs.first_components[2]

    def analyzer(self, name: str) -> Analyzer:
        """Return a running analyzer, for those that take observations from the training loop."""
        self._pairs.interrupt()
        return self._pairs.first_analyzers[name]

    def backend(self, name: str) -> Backend:
        """Return a backend by its name."""
        if name not in self._sink.backends:
            there = ", ".join(self._sink.backends) or "none"
            raise UsageError(f"backend {name!r}: expected one of those configured ({there}). Add it to backends.")
        return self._sink.backends[name]

    @property
    def reports(self) -> list[StepReport]:
        """Return the last reports, at most `max_gradient_history`, the newest last."""
        self._pairs.settle()
        return list(self._history.reports)

    @property
    def flight_recorder(self) -> list[StepReport]:
        """Return the steps up to the first fault, each with the statistics of every parameter; empty before it."""
        return list(self._history.first_fault)

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

    def on_rollback(self, function: Rollback) -> Rollback:
        """Call `function(step, report)` for a spike under `spike_action: rollback`, with the step to go back to.

        It is the last step whose `state_dict` was taken, outside of a run of spikes; 0 where none was.
        """
        if not callable(function):
            raise InputTypeError(
                f"on_rollback function {function!r}: expected a function of a step and a report. "
                "Pass one that loads the checkpoint of that step."
            )
        self._rollbacks.append(function)
        return function

    def diagnose(self) -> list[Issue]:
        """Return the issues of the run so far, in every pair: root causes first, at most five of each pair."""
        self._pairs.settle()
        return Issues(issue for pair in self._pairs for issue in pair.diagnose())

    def status(self) -> dict[str, Any]:
        """Return the numbers of steps and rows, and for each backend which rows it has delivered or lost, and why.

        Alerts have the numbers of the issues that they have posted, lost or still have to post.
        """
        return {
            "run_id": self._sink.run_id,
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            "closed": self._closed,
            "steps": {pair.name or "default": pair.step_count for pair in self._pairs},
            "journal": self._sink.journal_status(),
            "backends": self._sink.status(),
            "alerts": {name: worker.status() for name, worker in self._sink.alerts.items()},
        }

    def get_training_summary(self) -> TrainingSummary:
        """Return the summary of the training so far."""
        self._pairs.settle()
        return self._history.summary()

    def __repr__(self) -> str:
        steps = ", ".join(f"{pair.name} {pair.step_count}".strip() for pair in self._pairs) or "0"
        kept = ", ".join([*self._sink.backends, *([str(self.run_dir)] if self._sink.keeps_files else [])])
        return f"<GradientManager{' (closed)' if self._closed else ''}: steps {steps}; keeps {kept or 'nothing'}>"

    def _repr_html_(self) -> str:
        return self.get_training_summary()._repr_html_()

    def save_training_log(self, file_path: str | Path) -> Path:
        """Write the configuration, the summary and the kept reports as JSON."""
        return save_training_log(Path(file_path), self.config, self.get_training_summary(), self.reports)

    def plot_training_curves(self, save_path: str | Path) -> Path:
        """Draw loss, gradient norms, non-finite counts and clipping over time."""
        from gradtrack.drawing import figures
        from gradtrack.pages import pictures

        return figures.save(pictures.draw_training_curves(self.reports), Path(save_path))

    def state_dict(self, *, checkpoint: bool = True) -> dict[str, Any]:
        """Return the state that later steps depend on, as plain data; a rollback goes back to a `checkpoint`."""
        self._pairs.settle()
        pairs = self._pairs.state_dict(checkpoint=checkpoint)
        state = {"version": 1, "pairs": pairs, "history": self._history.state_dict()}
        return state | ({"run": run} if (run := self._sink.state_dict()) else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the state of a pair that is attached later is kept until then.

        A manager that has recorded nothing yet goes on with the run of the state, in its directory where that is the
        same, or was chosen by gradtrack.
        """
        check_state(state)
        self._pairs.interrupt()
        self._history.load_state_dict(state["history"])
        self._pairs.load_state_dict(state["pairs"])
        self._sink.resume(state.get("run", {}), {name: int(pair["step"]) for name, pair in state["pairs"].items()})

    def follow(self, model: nn.Module, optimizer: Any, *, step: Callable[[], int] | None = None) -> None:
        """Register hooks that run a step just before the first of the optimizers steps, or after each closure call.

        Gradients that the loop has passed to `step` itself since the last one are not measured again. `step` returns
        the place of the row on the trackers' axis.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        optimizers = as_sequence(optimizer)

        def look(loss: Tensor | float | None, scale: Scale | None) -> None:
            if loss is not None:
                check_loss(loss, False)
            pair = self._pairs.find(model, optimizers)
            if pair.seen_before_step:
                pair.seen_before_step = False
            elif not self._closed:
                if step is not None:
                    self._rows.place(pair.name, pair.step_count + 1, as_place(step()))
                pair.step(loss, scale=scale)
                if self._unused_settings.waits:
                    self._unused_settings.step({pair.name: pair.model for pair in self._pairs})

        def look_before_clipping(take_loss: TakeLoss, limit: float, usable: bool) -> bool:
            pair = self._pairs.find(model, optimizers)
            if self._closed or pair.seen_before_step or not pair.meets_clipping(limit, usable=usable):
                return False
            look(take_loss(), None)
            return True

        self._hooks.append(BeforeSteps(optimizers, look, look_before_clipping))
        self._hooks[-1].register()
        # The optimizer now refers to the manager, so the function that runs when it is collected must not refer back.
        self._at_exit.unhook = self._pairs.models_alone()

    def flush(self) -> None:
        """Apply the pending steps, and write all records to disk and to the backends."""
        self._pairs.settle()
        self._sink.flush()

    def close(self, *, failed: bool = False) -> None:
        """Deliver the remaining records and remove every hook; a second call does nothing."""
        if self._closed or self._sink.forked:
            return
        self._pairs.settle()
        self._closed = True
        try:
            self._pairs.end()
            self._remove_hooks()
            self._sink.tell_if_unkept(self._history.num_steps)
            self._leave_files(failed=failed)
        finally:  # an interrupt while pictures are drawn loses no row
            self._sink.close(failed=failed)
            self._at_exit.cancel()
            self._remove_hooks()  # again, since an interrupt may have kept some

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._pairs.close()

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

    def _leave_files(self, *, failed: bool) -> None:
        """Write how the run ended, and the pictures and the HTML report if the configuration asks for them."""
        config = self.config
        directory = self._sink.claim() if self._history.reports and self._sink.rank == 0 else None
        if directory is None:
            return
        last = [report for pair in self._pairs for report in pair.flight_recorder.read()[-1:]]
        run_id = self._sink.run_id
        end = RunEnd(
            run_id=run_id,
            summary=self.get_training_summary(),
            failed=failed,
            # Where the training ends for it, or as the interpreter exits after it has been printed.
            interrupted=failed and KeyboardInterrupt in (sys.exc_info()[0], getattr(sys, "last_type", None)),
            last=last,
            flight_recorder=self._history.first_fault,
        )
        at_close.contained("how the run ended", lambda: end.save(directory / RUN_END))
        left: list[Path] = []
        if config.save_gradient_plots and config.run_dir is not None:
            left += at_close.save_pictures(directory, run_id, self.reports, self._pairs.first_components[0].history)
        if config.save_html_report:
            left += at_close.save_page(directory, run_id, left)
        at_close.contained("the list of files", lambda: note_files(directory, run_id, left))
