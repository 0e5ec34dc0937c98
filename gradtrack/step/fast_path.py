"""Fast path for uneventful CPU steps: measure and clip in one compiled call, apply to the other components later."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from math import inf, isfinite, log
from operator import attrgetter, mul
from time import time as now
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.config import assignments
from gradtrack.gradients.collected import Gradients
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.moments import SMALLEST_SQUARES
from gradtrack.gradients.parameters import ParameterTable
from gradtrack.health.rule import LEAST_LEFT, MOST_TOGETHER, SLACK, TENFOLD, Band, CalmSteps, has_chosen_limit
from gradtrack.protection.clipping import clips_apart
from gradtrack.protection.strategies import Memory, clipping_fields, coefficient_of
from gradtrack.reports import HEALTHY, StepReport
from gradtrack.step.data import StepData, kept_batch, next_row
from gradtrack.step.history import History
from gradtrack.step.pending import PendingSteps
from gradtrack.support.interrupts import pass_on

if TYPE_CHECKING:
    from gradtrack.step.pair import Pair

_STEP: Final = TENFOLD - SLACK
_LOWEST: Final = 0.5 * math.log(SMALLEST_SQUARES)
_FIRST: Final = 2
"""The fast path starts after this step, at which settings without effect are reported."""
_FAR: Final = 2**63
_PATIENCE: Final = 4
_LONGEST_PAUSE: Final = 32
"""Upper bound of the back-off, in steps, after more than `_PATIENCE` attempts in a row to enter the path failed."""
_grad = attrgetter("grad")
_logger = logging.getLogger("gradtrack")


FastStep = tuple[float | None, float, float, float, Any, float | None, float]
"""The numbers of a fast step beside its sums: loss, norm, ln of the norm, clip rate, learning rates, limit of the norm
and the factor of clipping."""


class Terms(NamedTuple):
    """The layout and the settings that fast steps have in common, until a setting changes."""

    layout: Layout
    aliases: dict[str, list[str]]
    with_groups: bool
    with_parameters: bool
    clip_type: str
    limit: float | None
    """The fixed limit of the norm; infinite where it follows the norms, None where nothing is clipped."""
    has_chosen_limit: bool
    """Whether the user has set `max_grad_norm`."""
    epsilon: float
    memory: Memory
    shared: dict[str, Any]
    """Fields of the report that are the same on all of these steps."""

    @classmethod
    def of(cls, pair: Pair, layout: Layout) -> Terms:
        """Return the terms of the next steps of a pair."""
        config = pair.config
        limit = None
        if config.enable_gradient_clipping:
            limit = config.max_grad_norm if config.effective_clip_type == "norm" else inf
        return cls(
            layout=layout,
            aliases=pair.table.aliases,
            with_groups=config.grad_track_per_weight_matrix,
            with_parameters=config.track_parameters,
            clip_type=config.effective_clip_type,
            limit=limit,
            has_chosen_limit=has_chosen_limit(config),
            epsilon=pair.clipper.epsilon,
            memory=Memory.of(config),
            shared={"health": HEALTHY, "nan_inf": {"action": "none" if config.enable_nan_inf_check else "off"}},
        )


class FastSteps:
    """Steps of the fast path in the pending ring. Their reports keep neither the model nor its gradients alive.

    A step counts as made once its report is in `reports`, even if an exception interrupts the call after that.
    """

    def __init__(self, terms: Terms, results: NDArray[np.float64]) -> None:
        self.terms, self.steps, self.reports = terms, list[FastStep](), list[StepReport]()
        self.num_applied = 0
        """The number of components that the steps were applied to."""
        self._results, self._shared = results, True
        self._first = len(terms.layout.names)
        """The row of the first group; the rows before it belong to the parameters."""
        self._data: dict[int, StepData] = {}
        self._lock = threading.RLock()  # another thread or a signal handler may read a report

    def shrink(self) -> None:
        """Drop the rows of the single parameters, unless the reports have to show them."""
        with self._lock:
            for data in self._data.values():
                data.shrink()
            if not self.terms.with_parameters and self._first:
                self._results, self._first = self._results[:, self._first :].copy(), 0

    def fields(self, slot: int) -> Mapping[str, Any]:
        """Return the fields of the report of a step."""
        return self.data(slot).fields()

    def data(self, slot: int) -> StepData:
        """Return the data of a step, made on the first call."""
        with self._lock:
            data = self._data.get(slot)
            if data is None:
                data = self._data[slot] = self._make(slot)
            return data

    def copy_results(self) -> None:
        """Copy the results, whose memory the plan uses for the next steps."""
        with self._lock:
            if self._shared:
                self._results, self._shared = self._results[: len(self.reports)].copy(), False

    def _make(self, slot: int) -> StepData:
        terms, results, first = self.terms, self._results[slot], self._first
        loss, norm, _, clip_rate, rates, limit, _ = self.steps[slot]
        data = StepData(terms.layout, {})
        data.aliases = terms.aliases
        data.with_groups, data.with_parameters = terms.with_groups, terms.with_parameters
        if self._shared:
            results = results.copy()
        if first:
            data.rows = results[:first]
        data.group_rows, data.total = results[first:-1], results[-1].tolist()
        data.loss, data.lr, data.nan_inf, data.health = loss, rates, terms.shared["nan_inf"], HEALTHY
        data.clipping = clipping_fields(terms.clip_type, limit, terms.epsilon, norm, clip_rate)
        return data


class _RingEntry(NamedTuple):
    """Fast steps with their path, in the pending ring; unlike the steps alone it holds the model."""

    path: FastPath
    steps: FastSteps

    def settle(self) -> None:
        """Apply the steps; no further one is added to them."""
        self.steps.copy_results()
        self.path.apply(self.steps)


@final
class FastPath:
    """Measures and clips steps on which no rule can open an issue, and puts them into the pending ring.

    It stays open from one step to the next. It checks the settings and the model itself; the caller of any other
    change that it relies on has to `close` it.
    """

    def __init__(self, pair: Pair, history: History, pending: PendingSteps) -> None:
        self._pair, self._history, self._pending = pair, history, pending
        self._failures = self._pause = 0
        self._is_open = self._is_to_close = self._is_watched = False
        self._assignments = self._room = 0
        self._until: float = 0
        self._band: Band = (inf, -inf)
        self._low, self._high = self._band
        self._table: ParameterTable
        self._plan: Any
        self._steps: FastSteps
        self._entry: _RingEntry

    def take(self, loss: Tensor | float | None, epoch: int | None, batch: object) -> StepReport | None:
        """Measure and clip the gradients of an uneventful step; for any other return None and change no gradient."""
        if not self._is_open:
            return None
        # In one piece, since during a training each call costs about a microsecond.
        pair, pending = self._pair, self._pending
        with pending.lock:
            pending.is_taking = True
            try:
                if self._steps.num_applied and not self._go_on():  # a reader has settled them
                    return None
                step, table, steps = pair.step_count + 1, self._table, self._steps
                slot = len(steps.reports)
                if (
                    step >= self._until
                    or slot >= self._room  # an exception interrupted the step that should have settled them
                    or assignments.count != self._assignments
                    or pair.coming_loss is not None
                    or table.stale()
                ):
                    return None
                if type(loss) is Tensor:
                    if not loss.is_cpu or loss.numel() != 1:
                        return None
                    loss = loss.item()
                if loss is not None and not (type(loss) is float and isfinite(loss)):
                    return None
                if epoch is not None and not (type(epoch) is int and -_FAR < epoch < _FAR):
                    return None
                if len(steps.steps) > slot:  # an exception interrupted its step
                    del steps.steps[slot:]
                terms, high = steps.terms, self._high
                limit = terms.limit
                if limit == inf:
                    limit = pair.clipper.limit()
                    self._plan.limit(limit, terms.epsilon)
                    high = min(high, _highest(limit, LEAST_LEFT, terms.epsilon))
                norm = self._plan.look(list(map(_grad, table.params)), slot, self._low, high)
                if not norm > 0:
                    return None
                log_norm, rate, coefficient = log(norm), 0.0, 1.0
                report = StepReport.deferred(
                    partial(steps.fields, slot),
                    terms.shared,
                    step=step,
                    epoch=epoch,
                    source=pair.name,
                    time=now(),
                    batch=None if batch is None else kept_batch(batch),
                )
                if limit is not None:
                    coefficient = coefficient_of(norm, limit, terms.epsilon)
                    if terms.limit == inf:
                        pair.clipper.observe([(norm, norm * coefficient)], terms.memory)
                    rate = pair.clipper.engage(coefficient < 1.0)
                steps.steps.append((loss, norm, log_norm, rate, pair.optimizer_steps.rates(), limit, coefficient))
                pair.step_count = step
                steps.reports.append(report)
                self._failures = 0
                low, high = self._band
                self._low = low if low > log_norm - _STEP else log_norm - _STEP
                self._high = high if high < log_norm + _STEP else log_norm + _STEP
            finally:
                pending.is_taking = False
            if pending.held is not self._entry:
                pending.hold(self._entry)
            if self._is_watched and pair.judge.jumps(log_norm, loss):
                self.close()
                pair.analyzers.alert(step + 1)
                pair.analyzers.arm(pair.model, step + 1)
            elif self._is_to_close:
                self.close()
            elif slot + 1 >= self._room:
                pending.settle()
                self._go_on()
        return report

    def open(self, grads: Gradients, *, scaled: bool) -> None:
        """Open the path for the next steps if they may be uneventful, with the plan and the layout of this step."""
        if self._pause:  # back-off: no recent attempt has led to a fast step
            self._pause -= 1
            return
        pair, config, count = self._pair, self._pair.config, assignments.count
        if not (
            grads.as_planned
            and pair.step_count >= _FIRST
            and not scaled
            and config.enable_gradient_monitoring
            and config.check_frequency == 1
            and not (config.debug_mode or config.per_rank or config.spike_action != "report")
            and not (config.enable_gradient_clipping and clips_apart(config))
            and pair.is_plain
        ):
            return
        layout = grads.layout
        self._plan, self._table, self._assignments = layout.plan, pair.table, count
        terms = Terms.of(pair, layout)
        self._plan.limit(inf if terms.limit is None else terms.limit, terms.epsilon)
        if self._go_on(terms):
            self._failures += 1
            self._pause = min(self._failures, _LONGEST_PAUSE) if self._failures > _PATIENCE else 0

    def close(self) -> None:
        """Settle the pending steps, and refuse steps until the path is opened again."""
        if not self._is_open:
            self._pending.settle()
            return
        with self._pending.lock:
            if self._pending.is_taking:  # a signal handler closes: the step is added first
                self._is_to_close = True
            else:
                self._is_open, self._until = False, 0
                self._pending.settle()

    def apply(self, steps: FastSteps) -> None:
        """Apply steps to the other components; each gets them at most once, even if an exception interrupts it."""
        del steps.steps[len(steps.reports) :]
        if not steps.reports:
            return
        pair, terms, reports = self._pair, steps.terms, steps.reports
        losses, norms, log_norms, _, _, limits, coefficients = zip(*steps.steps, strict=True)
        clipped = [coefficient < 1.0 for coefficient in coefficients]
        calm = CalmSteps(log_norms, losses, limits if terms.has_chosen_limit else (None,) * len(norms), clipped)
        clipped_norms = list(zip(norms, map(mul, norms, coefficients), strict=True))
        components: tuple[Callable[[], object], ...] = (
            lambda: pair.clipper.observe(clipped_norms, terms.memory) if terms.limit not in (None, inf) else None,
            lambda: pair.judge.remember(calm, terms.layout.missing),
            lambda: pair.flight_recorder.push(reports, steps.data, steps.shrink),
            lambda: pair.monitor.keep(*reports),
            lambda: self._history.extend(reports, norms, size=pair.config.max_gradient_history, clipped=sum(clipped)),
        )
        while steps.num_applied < len(components):
            apply = components[steps.num_applied]
            steps.num_applied += 1
            try:
                apply()
            except Exception as fault:
                pass_on(fault)
                _logger.exception("steps %d to %d are incomplete", reports[0].step, reports[-1].step)

    def _go_on(self, terms: Terms | None = None) -> bool:
        """Set how many steps the path may take and the bounds of their norms; return whether it is open."""
        pair = self._pair
        following = pair.step_count + 1
        self._is_open, self._until = False, next_row(following, pair.config.grad_log_every_n_steps)
        if pair.config.skip_steps:
            self._until = min(self._until, pair.spikes.next_listed(following))
        self._is_watched = bool(pair.analyzers.running)
        room = min(MOST_TOGETHER, len(self._plan.results))
        if self._is_watched:  # the hooks of an analyzer are registered at the end of the step before
            self._until = min(self._until, pair.analyzers.quiet_until(following, room + 1) - 1)
        for recorder in pair.recorders:
            self._until = min(self._until, recorder.next_step(following))
        if following >= self._until:
            return False
        terms = terms if terms is not None else self._steps.terms
        last = pair.judge.last_log_norm
        if not isfinite(last):
            return False
        low, high = pair.monitor.health.band(pair.config)
        if terms.limit is not None:
            # Above this norm clipping leaves so little, or begins for the first time, that the step is judged at once.
            share = 1.0 if pair.protection.clips_by_default else LEAST_LEFT
            high = min(high, _highest(terms.limit, share, terms.epsilon))
        self._band = max(low, _LOWEST), high
        self._low, self._high = max(self._band[0], last - _STEP), min(self._band[1], last + _STEP)
        if self._low < self._high:
            self._steps = FastSteps(terms, self._plan.results)
            self._entry = _RingEntry(self, self._steps)
            self._room, self._is_to_close, self._is_open = room, False, True
        return self._is_open


def _highest(limit: float, share: float, epsilon: float) -> float:
    """Return ln of the largest norm of which clipping to the limit leaves a share."""
    norm = limit / share - epsilon
    return log(norm) - SLACK if norm > 0 else -inf
