"""One (model, optimizer) pair: from its gradients to the report of a step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradtrack.analyzers.base import Snapshot, rarely
from gradtrack.config import GradientConfig
from gradtrack.gradients.collected import Gradients, SharedGradients
from gradtrack.gradients.distributed.shards import unwrapped
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.moments import Moments
from gradtrack.gradients.parameters import ParameterTable
from gradtrack.health.monitor import GradientMonitor
from gradtrack.protection.clipping import GradientClipper
from gradtrack.protection.nonfinite import NaNInfHandler
from gradtrack.reports import Issue, LateReport, StepReport
from gradtrack.step.analyzers import LiveAnalyzers
from gradtrack.step.data import Outcome, StepFacts
from gradtrack.step.fast_path import UsualSteps
from gradtrack.step.history import FlightRecorder, History
from gradtrack.step.judge import Judgement
from gradtrack.step.loss_scale import Scale, ScalerLog
from gradtrack.step.measure import Gauge
from gradtrack.step.on_device import LateStep, WaitingStep, can_wait, on_device
from gradtrack.step.optimizers import Stepping
from gradtrack.step.protect import Guard
from gradtrack.step.ranks import SharedReading

Components = tuple[GradientMonitor, GradientClipper, NaNInfHandler]


class Pair:
    """A model with its optimizers, its own windows and its own count of optimizer steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        *,
        config: GradientConfig,
        measurer: Measurer,
        components: Components,
        analyzers: LiveAnalyzers,
        name: str = "",
        horizon: int | None = None,
        process_group: Any = None,
        history: History | None = None,
    ) -> None:
        self.model, self.name, self.horizon = model, name, horizon
        self.config, self.analyzers = config, analyzers
        self.monitor, self.clipper, self.handler = components
        self.guard = Guard(self.handler, self.clipper)
        self.gauge = Gauge(model, config, measurer, process_group)
        self.judgement = Judgement(config, self.monitor)
        self._sharing = SharedReading(self.gauge, self.guard, self.judgement, analyzers)
        self.scaler_log = ScalerLog()
        self.step_count = 0
        self.flight = FlightRecorder()
        self.coming_notes: list[str] = []
        self.seen_before_step = False
        """Whether the loop itself has shown the gradients for the optimizer's coming step."""
        self.coming_loss: Tensor | float | None = None
        """The sum over the micro-batches of the coming step."""
        self.waiting = WaitingStep(self._conclude_late)
        self.stepping = Stepping()
        self.usual = UsualSteps(self, history if history is not None else History(config.max_gradient_history))
        self.monitor.settle, self.monitor.interrupt = self.usual.settle, self.usual.close
        self.clipper.settle = self.usual.settle
        self.bind(optimizers)

    @property
    def table(self) -> ParameterTable:
        """Return the parameters of the model as they were at the last step."""
        return self.gauge.table

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Return what steps the model."""
        return self.stepping.optimizers

    def owned(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that the optimizers own."""
        return self.stepping.params()

    def bind(self, optimizers: Sequence[Any]) -> None:
        """Take the optimizers that step the model; each must own at least one of its parameters."""
        self.usual.close()
        self.stepping.bind(optimizers, self.table)
        self.watch()

    def watch(self, *, running: bool = True) -> None:
        """Watch what the optimizers take where an analyzer may ask; one of them may be `running` a step now."""
        if self.analyzers:
            self.stepping.watch(running=running)

    def arm(self) -> None:
        """Arm the analyzers for the coming step, and watch what the optimizers take."""
        self.watch()
        self.analyzers.arm(self.model, self.step_count + 1)

    def continue_from(self, step: int) -> None:
        """Count the next step as the one after `step`, and arm what is due there."""
        self.usual.close()
        if step != self.step_count:
            self.step_count = step
            self.analyzers.arm(self.model, step + 1)

    def add_loss(self, loss: Tensor | float | None) -> None:
        """Add the loss of a micro-batch to that of the coming step."""
        if loss is not None:
            value = _summable(loss)
            self.coming_loss = value if self.coming_loss is None else self.coming_loss + value

    def unmeasured(self, epoch: int | None) -> StepReport:
        """Report a micro-batch whose gradients are not complete yet."""
        loss = self.coming_loss
        fields = {
            "health": self.judgement.health,
            "clipping": {
                "enabled": self.config.enable_gradient_clipping,
                "clip_type": self.config.effective_clip_type,
            },
            "nan_inf": {"action": "unchecked"},
        }
        known = {"step": self.step_count, "epoch": epoch, "source": self.name, "measured": False, "time": time.time()}
        return StepReport.deferred(lambda: {**fields, "loss": None if loss is None else float(loss)}, **known)

    @property
    def is_plain(self) -> bool:
        """Whether nothing makes its steps other than those of one optimizer over parameters of its own."""
        told = self.coming_notes or self.gauge.coming_notes or self.analyzers.chosen
        return self.gauge.is_plain and self.judgement.is_calm and not (self.stepping.has_closures or told)

    def step(self, *, scale: Scale | None, epoch: int | None, batch: object) -> Outcome:
        """Measure, protect and judge the gradients that are there now; with a scale a loss scaler steps by them."""
        self.usual.close()
        repeated = self.stepping.has_closures and self.stepping.calls_again()
        if not repeated:
            self.step_count += 1
        grads = self.gauge.collect(None if scale is None else {id(param) for param in self.owned()})
        outcome = self._open(grads, epoch=epoch, batch=batch, repeated=repeated)
        outcome.scale = scale
        loss, self.coming_loss = self.coming_loss, None
        if on_device(grads.tensors) and self._may_be_late(outcome, scaled=scale is not None):
            self._leave_on_device(grads, outcome, loss)
        else:
            self._finish(grads, outcome, loss)
        return outcome

    def take_late(self) -> Outcome | None:
        """Return the last step with its numbers, where nobody has waited for them so far."""
        return self.waiting.take()

    def _open(self, grads: Gradients, *, epoch: int | None, batch: object, repeated: bool) -> Outcome:
        """Begin the report of a step with what is known before its numbers."""
        config, step = self.config, self.step_count
        facts = StepFacts(grads.layout, grads.touched_rows)
        facts.aliases = self.gauge.table.aliases
        due = not (repeated or step % config.grad_log_every_n_steps)
        facts.full = config.enable_gradient_monitoring and (due or not (repeated or step % config.check_frequency))
        facts.with_groups, facts.with_parameters = config.grad_track_per_weight_matrix, config.track_parameters
        facts.lr = self.stepping.rates()
        outcome = Outcome(facts, repeated=repeated)
        outcome.event = due
        outcome.report = StepReport.deferred(
            facts, step=step, epoch=epoch, source=self.name, time=time.time(), batch=batch
        )
        return outcome

    def _may_be_late(self, outcome: Outcome, *, scaled: bool) -> bool:
        """Whether nobody needs the numbers of this step, which are on a device, before the next one."""
        return (
            self.table.ranks is None
            and not (outcome.event or outcome.repeated or self.analyzers.due(self.step_count))
            and can_wait(self.config, self.optimizers, scaled=scaled)
        )

    def _leave_on_device(self, grads: Gradients, outcome: Outcome, loss: Tensor | float | None) -> None:
        self.gauge.fit(grads, outcome.facts)
        outcome.pending = LateStep(grads, loss, self.clipper, self.handler, variances=outcome.facts.full)
        outcome.pending.protect(grads, self.optimizers, scaled=outcome.scale is not None)
        self.stepping.may_hold_found_inf = True
        self.waiting.hold(outcome)
        self.analyzers.arm(self.model, self.step_count + 1)

    def _conclude_late(self, moments: Moments, outcome: Outcome) -> None:
        """Judge and keep a step whose numbers have come."""
        self._judge(moments, outcome)
        outcome.report.defer_to(outcome.facts)  # so that a report that nobody reads keeps no model alive
        self._keep(moments, outcome)

    def _finish(self, grads: Gradients, outcome: Outcome, loss: Tensor | float | None) -> None:
        """Measure, protect, judge and keep a step here and now."""
        facts = outcome.facts
        if self.stepping.may_hold_found_inf:
            self.stepping.forget_found_inf()
        scaled = outcome.scale is not None
        row_due = outcome.event and facts.full
        if isinstance(grads, SharedGradients):
            shown = partial(self._unmeasured_snapshot, grads)
            moments = self._sharing.read(grads, outcome, loss, row_due=row_due, shown=shown)
        else:
            moments = self.gauge.read(grads, facts, loss, row_due=row_due)
        made = self.guard.protect(grads, moments, self._stepped, scaled=scaled, remember=not outcome.repeated)
        facts.nan_inf, facts.clipping = made.nan_inf, made.clipping
        if made.skipped or made.error is not None:
            facts.skipped, outcome.error = made.skipped, made.error
            if outcome.scale is not None and made.skipped:
                outcome.scale.leave_out()
        if outcome.repeated:
            facts.health = self.judgement.health
            return
        self._judge(moments, outcome)
        if outcome.event and facts.full and facts.with_groups:
            self.gauge.weigh(facts)
        gauge, several = self.gauge, self.gauge.table.ranks is not None or self.config.per_rank
        if several or self.coming_notes or gauge.coming_notes or self.analyzers.chosen:
            self._note(facts)
        if self.analyzers.running:
            self._look(grads, outcome)
        self._keep(moments, outcome)
        if self.monitor.health.room:
            self.usual.open(grads, outcome)

    def _keep(self, moments: Moments, outcome: Outcome) -> None:
        facts = outcome.facts
        outcome.norm, outcome.clipped = moments.norm, facts.clipping.get("clipped", False)
        if outcome.event and moments.has_ends:
            facts.full = self.config.enable_gradient_monitoring
        self.flight.push((outcome.report,), lambda _: facts, facts.shrink)
        self.monitor.keep(outcome.report)

    def _judge(self, moments: Moments, outcome: Outcome) -> None:
        facts, scale = outcome.facts, outcome.scale
        if scale is not None:
            facts.scaler = self.scaler_log.take(scale, skipped=facts.skipped)
        critical = not moments.finite and self.handler.is_critical(moments, facts.layout.total_count)
        self.judgement.judge(moments, outcome, critical=critical, watched=bool(self.analyzers.running))
        if outcome.opened or self.judgement.startled:
            self.analyzers.alert(outcome.report.step + 1)

    def _note(self, facts: StepFacts) -> None:
        """Let the report tell what is good to know."""
        of_gauge = self.gauge.notes(analyzed=self.analyzers.local)
        facts.notes = [*self.coming_notes, *self.analyzers.chosen, *of_gauge]
        self.coming_notes, self.analyzers.chosen = [], []

    def _look(self, grads: Gradients, outcome: Outcome) -> None:
        """Let the analyzers that are due look at the step, and arm those that are due at the next one."""
        facts, step = outcome.facts, self.step_count
        if self.gauge.has_shards:
            facts.notes = [*facts.notes, *self.analyzers.rest()]
        if self.analyzers.due(step):
            reports, notes = self.analyzers.inspect(self._snapshot(grads, outcome))
            facts.analyzers = reports
            facts.notes = [*facts.notes, *notes]
            # Judging a window costs more than looking at a step; what one rank sees of its part is one voice of many.
            heard = rarely(step) or step in self.analyzers.close_steps
            if heard and not self.gauge.has_shards:
                self.judgement.hear(self.analyzers.issues())
            outcome.late = [one for one in reports.values() if isinstance(one, LateReport) and one.step != step]
            outcome.event = outcome.event or len(reports) > len(outcome.late)
        self.analyzers.arm(self.model, step + 1)

    def _unmeasured_snapshot(self, grads: Gradients) -> Snapshot:
        """Return what there is to see of shards before the ranks have exchanged their sums."""
        return Snapshot(
            step=self.step_count,
            model=unwrapped(self.model),
            optimizers=self.optimizers,
            gradients=dict(zip(grads.layout.names, grads.tensors, strict=True)) if grads.tensors else {},
            elsewhere=self.gauge.left_out,
            counts_as=self.gauge.counts_as(),
        )

    def _snapshot(self, grads: Gradients, outcome: Outcome) -> Snapshot:
        facts = outcome.facts
        return Snapshot(
            step=self.step_count,
            model=unwrapped(self.model),
            epoch=outcome.report.epoch,
            loss=facts.loss,
            optimizers=self.optimizers,
            gradients=dict(zip(grads.layout.names, grads.tensors, strict=True)) if grads.tensors else {},
            norms=facts.norms(),
            groups=facts.groups(),
            lr=facts.learning_rates(),
            horizon=self.horizon,
            skipped=facts.skipped,
            scaled=outcome.scale is not None,
            series=self.judgement.series,
            call_before_step=self.stepping.call_before_step,
            elsewhere=self.gauge.left_out,
            counts_as=self.gauge.counts_as() if self.gauge.has_shards else None,
        )

    def diagnose(self) -> list[Issue]:
        """Return the faults of the run so far, those of the rules that are open or did harm and the analyzers'."""
        return self.judgement.diagnose(self.analyzers.issues())

    def _stepped(self) -> Iterable[nn.Parameter]:
        yield from self.table.params
        yield from self.owned()

    def close(self) -> None:
        """Remove what was hooked to the model and the optimizers."""
        self.usual.close()
        self.stepping.close()
        self.gauge.close()
        self.analyzers.close()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that rolls, as plain data."""
        self.usual.settle()
        return {
            "step": self.step_count,
            **self.judgement.state_dict(),
            "clipper": self.clipper.state_dict(),
            "scaler": self.scaler_log.state_dict(),
            "analyzers": self.analyzers.state_dict(),
            "close_steps": list(self.analyzers.close_steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.usual.close()
        self.step_count = int(state["step"])
        self.judgement.load_state_dict(state)
        self.clipper.load_state_dict(state["clipper"])
        if "scaler" in state:  # which states of older versions do not have
            self.scaler_log.load_state_dict(state["scaler"])
        self.analyzers.load_state_dict(state["analyzers"])
        self.analyzers.close_steps = list(state.get("close_steps", ()))
        self.analyzers.close()
        self.analyzers.arm(self.model, self.step_count + 1)


def _summable(loss: Tensor | float) -> Tensor | float:
    """Return a loss that can be added up without losing its bits, and without waiting for a device."""
    if not isinstance(loss, Tensor):
        return float(loss)
    if loss.is_cpu and not loss.is_meta and type(loss) in (Tensor, nn.Parameter):
        return float(loss.item())
    return loss.detach() if loss.dtype == torch.float64 else loss.detach().float()
