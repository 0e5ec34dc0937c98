"""A pair, one model with its optimizers: calls the stages of a step, from the gradients to the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

from torch import Tensor, nn

from gradtrack.analyzers.base import Snapshot
from gradtrack.config import GradientConfig
from gradtrack.gradients.collected import Gradients, SharedGradients, on_device
from gradtrack.gradients.distributed.shards import unwrapped
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.moments import Moments
from gradtrack.gradients.parameters import NamedParameter, ParameterTable
from gradtrack.health.monitor import GradientMonitor
from gradtrack.protection.clipping import GradientClipper
from gradtrack.protection.nonfinite import NaNInfHandler, clear_gradients
from gradtrack.protection.spikes import Rollback, SpikeDetector
from gradtrack.reports import Issue, LateReport, StepReport
from gradtrack.step.analyzers import RunningAnalyzers
from gradtrack.step.arguments import add_loss, labels_of
from gradtrack.step.data import Recorders, StepData, kept_batch
from gradtrack.step.fast_path import FastPath
from gradtrack.step.history import FlightRecorder, History
from gradtrack.step.judge import Judge
from gradtrack.step.loss_scale import Scale, ScalerLog
from gradtrack.step.measure import Measurement
from gradtrack.step.on_device import DeviceStep, PendingDeviceStep, can_wait, clips_there
from gradtrack.step.optimizers import PairOptimizers
from gradtrack.step.pending import PendingSteps
from gradtrack.step.protect import Protection
from gradtrack.step.ranks import RankExchange
from gradtrack.step.rows import Rows
from gradtrack.step.unused_settings import UnmeasuredSteps

IssueCallback = Callable[[Issue, StepReport], object]
Components = tuple[GradientMonitor, GradientClipper, NaNInfHandler]


class Pair:
    """A model with its optimizers, once they are bound, its clipper, rules, analyzers, and its own count of steps."""

    def __init__(
        self,
        model: nn.Module,
        *,
        config: GradientConfig,
        measurer: Measurer,
        components: Components,
        analyzers: RunningAnalyzers,
        name: str = "",
        horizon: int | None = None,
        process_group: Any = None,
        history: History | None = None,
        rows: Rows | None = None,
        callbacks: Sequence[IssueCallback] = (),
        rollbacks: Sequence[Rollback] = (),
    ) -> None:
        self.model, self.name, self.horizon = model, name, horizon
        self.config, self.analyzers = config, analyzers
        analyzers.caveat_taker = WeakMethod(self._add_caveats)  # the end of the pair has to let go of it
        self.monitor, self.clipper, self.handler = components
        self.spikes = SpikeDetector(config, rollbacks)
        self.protection = Protection(self.handler, self.clipper, self.spikes)
        self.measurement = Measurement(model, config, measurer, process_group)
        self.judge = Judge(config, self.monitor)
        self._rank_exchange = RankExchange(self.measurement, self.protection, self.judge, analyzers)
        self.scaler_log = ScalerLog()
        self.step_count = 0
        self.flight_recorder = FlightRecorder()
        self.coming_notes: list[str] = []
        self.seen_before_step = False
        """Whether the loop itself has called `manager.step` for the optimizer's coming step."""
        self.coming_loss: Tensor | float | None = None
        """The sum of the losses of the coming step's micro-batches."""
        self.optimizer_steps = PairOptimizers()
        self.named_elsewhere: Callable[[], Sequence[NamedParameter]] = tuple
        """Returns the parameters of the other pairs, among which a limit by group may find its own."""
        self.history = history if history is not None else History(config.max_gradient_history)
        self._rows, self._callbacks = rows, callbacks
        self.components_are_shared = False
        """Whether the user holds monitor or clipper, so that every step has to be applied to them at once."""
        self.recorders = Recorders()
        self.pending, self.unmeasured_steps = PendingSteps(), UnmeasuredSteps()
        self.fast_path = FastPath(self, self.history, self.pending)

    @property
    def table(self) -> ParameterTable:
        """Return the parameters of the model as they were at the last step."""
        return self.measurement.table

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Return the optimizers that step the model."""
        return self.optimizer_steps.optimizers

    def owned(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that the optimizers own."""
        return self.optimizer_steps.params()

    def bind(self, optimizers: Sequence[Any]) -> None:
        """Set the optimizers that step the model; each must own at least one of its parameters."""
        self.fast_path.close()
        self.clipper.group_limits.forget()
        self.optimizer_steps.bind(optimizers, self.table)
        self._add_outside()
        self.watch()

    def _add_outside(self) -> None:
        """Measure the parameters of the optimizers that are in no module, whatever other pairs do with them."""
        within = {id(param) for name, param in unwrapped(self.model).named_parameters(remove_duplicate=False)}
        self.measurement.add_outside(self.optimizer_steps.outside(within))

    def watch(self, *, running: bool = True) -> None:
        """Hook the optimizers' steps if there are analyzers; an optimizer may be `running` a step now."""
        if self.analyzers:
            self.optimizer_steps.watch(running=running)

    def arm(self) -> None:
        """Place the hooks of the analyzers and on the optimizers for the coming step."""
        self.watch()
        self.analyzers.arm(self.model, self.step_count + 1)

    def continue_from(self, step: int) -> None:
        """Count the next step as the one after `step`, and place the hooks of the analyzers that are due there."""
        self.fast_path.close()
        if step != self.step_count:
            self.step_count = step
            self.analyzers.arm(self.model, step + 1)

    def add_loss(self, loss: Tensor | float | None) -> None:
        """Add the loss of a micro-batch to that of the coming step."""
        self.coming_loss = add_loss(self.coming_loss, loss)
        self.unmeasured_steps.expect(self.optimizers, self.step_count)

    def unmeasured(self, epoch: int | None) -> StepReport:
        """Report a micro-batch whose gradients are not complete yet."""
        config, loss, now = self.config, self.coming_loss, time.time()
        clipping = {"enabled": config.enable_gradient_clipping, "clip_type": config.effective_clip_type}
        fields = {"health": self.judge.health, "clipping": clipping, "nan_inf": {"action": "unchecked"}}
        known: Any = {"step": self.step_count, "epoch": epoch, "source": self.name, "measured": False, "time": now}
        return StepReport.deferred(lambda: {**fields, "loss": None if loss is None else float(loss)}, **known)

    @property
    def is_plain(self) -> bool:
        """Whether steps are ordinary: no closure, shared component, open issue, rank or note that needs every stage."""
        told = self.coming_notes or self.measurement.coming_notes or self.analyzers.chosen
        special = self.optimizer_steps.has_closures or self.optimizer_steps.held_back or self.components_are_shared
        return self.measurement.is_plain and self.judge.is_calm and not (special or told)

    def meets_clipping(self, limit: float, *, usable: bool) -> bool:
        """Say whether to measure now, before the program itself clips; a note tells once which norms are reported."""
        usable, text = self.protection.meet_clipping(limit, usable=usable)
        self.coming_notes += [text] if text else []
        self._add_caveats([text] if text and not usable else [])
        return usable

    def share_components(self) -> None:
        """Apply every step to monitor and clipper at once from now on."""
        self.components_are_shared = True
        self.fast_path.close()

    def step(
        self, loss: Tensor | float | None, *, scale: Scale | None = None, epoch: int | None = None, batch: object = None
    ) -> StepReport:
        """Measure, protect, judge and record the gradients of a step; with a scale a loss scaler steps by them."""
        if scale is None and (report := self.fast_path.take(loss, epoch, batch)) is not None:
            return report
        self.fast_path.close()
        self.optimizer_steps.restore_steps()
        if self.optimizer_steps.has_new_groups():
            self._add_outside()
            self.clipper.group_limits.forget()
        if self.config.judges_spikes:
            self.spikes.check()
        if self.clipper.limits_groups:
            self.measurement.refresh()
            limits, labels = self.clipper.limits, partial(labels_of, self.optimizers)
            self.clipper.group_limits.find(limits, self.table, labels, self.named_elsewhere)
        total, self.coming_loss = add_loss(self.coming_loss, loss), None  # at once: an exception must not double it
        repeated = self.optimizer_steps.has_closures and self.optimizer_steps.calls_again()
        if self.optimizer_steps.outside_note:
            self.coming_notes.append(self.optimizer_steps.outside_note)
            self.optimizer_steps.outside_note = ""
        self.step_count += not repeated
        grads = self.measurement.collect(None if scale is None else {id(param) for param in self.owned()})
        data = StepData.begin(grads, self.config, self.step_count, repeated=repeated)
        data.epoch, data.source, data.batch = epoch, self.name, batch
        data.scale, data.lr, data.aliases = scale, self.optimizer_steps.rates(), self.table.aliases
        data.has_own_limit = self.clipper.limit_of_step is not None
        if self.analyzers.running and self.analyzers.due(data.step):
            data.loss_graph = getattr(loss, "grad_fn", None)
        known: Any = {"step": data.step, "epoch": epoch, "source": self.name, "time": data.time}
        report = StepReport.deferred(data.fields, **known, batch=kept_batch(batch))
        there = on_device(grads.tensors)
        total = self._rank_exchange.agree(data.step, total, partial(clips_there, grads, self.clipper, there=there))
        self.recorders.measured(grads, batch, data)
        data.can_stay = there and self._rank_exchange.all_clip_there and self._can_stay_on_device(grads, data)
        if data.can_stay and not self.analyzers.due(data.step):
            self._leave_on_device(grads, report, data, total)
        else:
            self._finish(grads, report, data, total)
        return report

    def _can_stay_on_device(self, grads: Gradients, data: StepData) -> bool:
        """Whether only an analyzer may need the numbers of this step, which are on a device, before the next one."""
        step, listed = self.step_count, self.config.skip_steps and self.spikes.lists(self.step_count)
        waits = self.table.ranks is None and self.recorders.due(step)  # ranks with shards have to decide alike
        if waits or data.event or data.repeated or listed or self.analyzers.adds_up(step):
            return False
        return can_wait(self.config, self.optimizers, grads, self.clipper, scale=data.scale)

    def _leave_on_device(
        self, grads: Gradients, report: StepReport, data: StepData, loss: Tensor | float | None
    ) -> None:
        """Measure and protect a step on its device, and hold it in the pending ring."""
        self.measurement.fit(grads, data)
        step = DeviceStep(grads, loss, self.clipper, self.handler, self.spikes, full=data.full)
        step.protect(grads, self.optimizers, scale=data.scale)
        self.optimizer_steps.may_hold_found_inf = True
        self.pending.hold(PendingDeviceStep(report, data, step, judge=self._judge_device_step, conclude=self._conclude))
        self.monitor.keep(report)
        self.analyzers.arm(self.model, self.step_count + 1)

    def _judge_device_step(self, moments: Moments, data: StepData) -> None:
        """Judge a step whose numbers have arrived from the device."""
        self._judge(moments, data)
        self._complete(moments, data)

    def _finish(self, grads: Gradients, report: StepReport, data: StepData, loss: Tensor | float | None) -> None:
        """Run all stages of a step now: measure, protect, judge, analyze, keep and record."""
        if self.optimizer_steps.may_hold_found_inf:
            self.optimizer_steps.forget_found_inf()
        row_due = data.event and data.full
        if isinstance(grads, SharedGradients):
            shown = partial(self.measurement.snapshot, grads, self.step_count, self.optimizers)
            moments = self._rank_exchange.read(grads, data, loss, row_due=row_due, shown=shown)
        else:
            moments = self.measurement.read(grads, data, loss, row_due=row_due)
        self.protection.protect(grads, moments, data, self._to_remove)
        skips = data.skipped and (data.scale is None or data.leaves_out_spike)  # the scaler skips what has overflowed
        if skips:
            self.optimizer_steps.skip_step()
        elif data.skipped and data.scale is not None:
            data.scale.leave_out()
        error, scaled = data.error, data.scale is not None
        try:
            if data.repeated:
                data.health = self.judge.health
                data.release()
            else:
                self.measurement.measure_weights(data, self.owned())
                self._judge(moments, data)
                self.measurement.measure_weights(data, self.owned())
                noted = self.coming_notes or self.measurement.coming_notes or self.analyzers.chosen
                if noted or self.table.ranks is not None or self.config.per_rank:
                    self._note(data)
                if self.analyzers.running:
                    self._run_analyzers(grads, data)
                self._complete(moments, data)
                self.recorders.judged(report, data, moments.finite)
                self.monitor.keep(report)
                self._conclude(report, data)
                self.fast_path.open(grads, scaled=scaled)
        finally:  # also where a callback of the user stops the training: nothing that is not finite is left behind
            if skips and self.optimizer_steps.can_skip:
                clear_gradients(self._stepped())
        if error is not None:
            raise error
        if data.spike is not None and data.spike["action"] == "rollback":
            self.spikes.roll_back(report, self.optimizers, self._rank_exchange.largest)

    def _judge(self, moments: Moments, data: StepData) -> None:
        scale = data.scale
        if scale is not None:
            data.scaler = self.scaler_log.update(scale, skipped=data.skipped and not data.leaves_out_spike)
        self.protection.note_default_limit(data)
        self.protection.remember(moments, data)
        critical = not moments.finite and self.handler.is_critical(moments, data.layout.total_count)
        self.judge.judge(moments, data, critical=critical, watched=bool(self.analyzers.running))
        if data.opened or self.judge.jumped:
            self.analyzers.alert(data.step + 1)

    def _complete(self, moments: Moments, data: StepData) -> None:
        """Set the fields that are known after judging: the norm, and whether the row has statistics."""
        data.norm = moments.norm
        if data.event and moments.has_ends:
            data.full = self.config.enable_gradient_monitoring

    def _conclude(self, report: StepReport, data: StepData) -> None:
        """Keep and record a step, then call the user's callbacks, which may stop the training."""
        healthy, opened = data.health.healthy, data.opened
        self.flight_recorder.push((report,), lambda _: data, data.shrink)
        counts = {"clipped": data.clipped, "skipped": data.skipped, "unhealthy": not healthy}
        self.history.extend((report,), (data.norm,), size=self.config.max_gradient_history, **counts)
        self.history.add_faults(data.nan_inf, data.issues)
        if not healthy and not self.history.first_fault:
            self.history.first_fault = self.flight_recorder.read()
        if self._rows is not None and (data.event or data.late):
            self._rows.record(report, data, lambda: self.analyzers.panels)
        data.release()
        for issue in opened:
            for callback in self._callbacks:
                callback(issue, report)

    def _note(self, data: StepData) -> None:
        """Add the pending notes to the report."""
        of_measurement = self.measurement.notes(analyzed=self.analyzers.local)
        data.notes = [*data.notes, *self.coming_notes, *self.analyzers.chosen, *of_measurement]
        self.coming_notes, self.analyzers.chosen = [], []

    def _add_caveats(self, texts: Iterable[str]) -> None:
        if self._rows is not None:
            self._rows.add_caveats(self.name, texts)

    def _run_analyzers(self, grads: Gradients, data: StepData) -> None:
        """Run the analyzers that are due at the step, and place the hooks of those that are due at the next one."""
        if self.measurement.has_shards:
            data.notes = [*data.notes, *self.analyzers.leave_out_incomplete()]
        if self.analyzers.due(data.step):
            data.analyzers, told = self.analyzers.inspect(self._snapshot(grads, data))
            data.notes = [*data.notes, *told]
            if not self.measurement.has_shards:  # with shards the ranks exchange their issues
                self.judge.add_analyzer_issues(self.analyzers.issues_at_looks(), data)
            found = data.analyzers.values()
            data.late = [one for one in found if isinstance(one, LateReport) and one.step != data.step]
            data.event = data.event or len(found) > len(data.late)
        self.analyzers.arm(self.model, data.step + 1)

    def _snapshot(self, grads: Gradients, data: StepData) -> Snapshot:
        return self.measurement.snapshot(
            grads,
            self.step_count,
            self.optimizers,
            epoch=data.epoch,
            loss=data.loss,
            norms=self.table.within(data.norms()),
            groups=self.table.within(data.groups()),
            lr=data.learning_rates(),
            horizon=self.horizon,
            skipped=data.skipped,
            scaled=data.scale is not None,
            series=self.judge.series,
            loss_graph=data.loss_graph,
            call_before_step=self.optimizer_steps.call_before_step,
        )

    def diagnose(self) -> list[Issue]:
        """Return the issues of the run so far: those of the rules that are open or did harm, and the analyzers'."""
        return [issue.of(self.name) for issue in self.judge.diagnose(self.analyzers.issues())]

    def _stepped(self) -> Iterable[nn.Parameter]:
        """Yield what the optimizers of this pair step; gradients of any other optimizer are left alone."""
        yield from self.owned()
        if self.table.ranks is not None:  # between its passes FSDP2 has whole parameters in the place of shards
            yield from self.table.params

    def _to_remove(self) -> Iterable[nn.Parameter]:
        """Return the parameters whose gradients have to go for a skip: none where the step itself is held back."""
        return () if self.optimizer_steps.can_skip else self._stepped()

    def close(self) -> None:
        """Remove the hooks from the model and the optimizers."""
        self.fast_path.close()
        for part in (self.optimizer_steps, self.unmeasured_steps, self.measurement, self.analyzers, self.recorders):
            part.close()

    def state_dict(self, *, checkpoint: bool = True) -> dict[str, Any]:
        """Return the state that later steps depend on, as plain data; a rollback goes back to a `checkpoint`."""
        self.pending.settle()
        return {
            "step": self.step_count,
            "spikes": self.spikes.state_dict(self.step_count if checkpoint else None),
            **self.judge.state_dict(),
            "clipper": self.clipper.state_dict(),
            "scaler": self.scaler_log.state_dict(),
            "analyzers": self.analyzers.state_dict(),
            "close_steps": list(self.analyzers.close_steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.fast_path.close()
        self.step_count = int(state["step"])
        self.judge.load_state_dict(state)
        self.clipper.load_state_dict(state["clipper"])
        if "scaler" in state:  # which states of older versions do not have
            self.scaler_log.load_state_dict(state["scaler"])
        self.spikes.load_state_dict(state.get("spikes"), self.step_count)
        self.analyzers.load_state_dict(state["analyzers"])
        self.analyzers.close_steps = list(state.get("close_steps", ()))
        self.analyzers.close()
        self.analyzers.first_step = self.step_count + 1
        self.analyzers.arm(self.model, self.step_count + 1)
