"""Fast path for uneventful CPU steps: measure and clip in one compiled call, apply to the other components later."""

from __future__ import annotations

import math
import os
import threading
import weakref
from functools import partial
from math import isfinite, log
from operator import attrgetter
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
from gradtrack.health.rule import LEAST_LEFT, SLACK, TENFOLD, CalmStep, has_chosen_limit
from gradtrack.protection.clipping import clipping_fields
from gradtrack.protection.strategies import ClippedNorm
from gradtrack.reports import HEALTHY, StepReport
from gradtrack.step.data import Outcome, StepFacts
from gradtrack.step.history import History, Known

if TYPE_CHECKING:
    from gradtrack.step.pair import Pair

Entry = tuple[float | None, float, float, float, Any]
"""What is known of a step beside its sums: loss, norm, ln of the norm, clip rate and learning rates."""


class Common(NamedTuple):
    """What usual steps have in common for as long as nothing changes."""

    layout: Layout
    aliases: dict[str, list[str]]
    with_groups: bool
    with_parameters: bool
    clip_type: str
    limit: float | None
    epsilon: float
    nan_inf: dict[str, Any]

    def clipping(self, norm: float, clip_rate: float) -> dict[str, Any]:
        """Return the fields of a `ClippingReport`."""
        return clipping_fields(self.clip_type, self.limit, self.epsilon, norm, clip_rate)


class Stretch:
    """Steps that wait to be taken in; their reports can be read before, and keep neither model nor gradients alive."""

    __slots__ = ("_facts", "_first", "_lock", "_results", "_shared", "common", "entries")

    def __init__(self, common: Common, results: NDArray[np.float64]) -> None:
        self.common, self.entries = common, list[Entry]()
        self._results, self._shared = results, True
        self._first = len(common.layout.names)
        """The row of the first group; what comes before belongs to the parameters."""
        self._facts: dict[int, StepFacts] = {}
        self._lock = threading.RLock()  # another thread may read a report, and a handler of a signal

    def leave(self) -> None:
        """Let the memory of the results be used for the next steps."""
        with self._lock:
            self._results, self._shared = self._results[: len(self.entries)].copy(), False

    def shrink(self) -> None:
        """Forget the rows of the single parameters, unless the reports are to show them."""
        with self._lock:
            for facts in self._facts.values():
                facts.shrink()
            if not self.common.with_parameters:
                self._results, self._first = self._results[:, self._first :].copy(), 0

    def fields(self, slot: int) -> dict[str, Any]:
        """Return the fields of the report of a step."""
        return self.facts(slot)()

    def facts(self, slot: int) -> StepFacts:
        """Return what is known of a step."""
        with self._lock:
            facts = self._facts.get(slot)
            if facts is None:
                facts = self._facts[slot] = self._make(slot)
            return facts

    def _make(self, slot: int) -> StepFacts:
        common, results, first = self.common, self._results[slot], self._first
        loss, norm, _, clip_rate, rates = self.entries[slot]
        facts = StepFacts(common.layout, {})
        facts.aliases = common.aliases
        facts.with_groups, facts.with_parameters = common.with_groups, common.with_parameters
        if self._shared:
            results = results.copy()
        if first:
            facts.rows = results[:first]
        facts.group_rows, facts.total = results[first:-1], results[-1].tolist()
        facts.loss, facts.lr = loss, rates
        facts.nan_inf, facts.clipping, facts.health = common.nan_inf, common.clipping(norm, clip_rate), HEALTHY
        return facts


_STEP: Final = TENFOLD - SLACK
_LOWEST: Final = 0.5 * math.log(SMALLEST_SQUARES)
_FIRST: Final = 2
"""Before that step there is something to be told of the settings."""
_FAR: Final = 2**63
_PATIENCE: Final = 4
_LONGEST_PAUSE: Final = 32
"""After so many steps that were none, it is asked less and less often whether the next may be usual."""
_grad = attrgetter("grad")


_everyone: weakref.WeakSet[UsualSteps] = weakref.WeakSet()


@final
class UsualSteps:
    """Looks at the steps of a pair on which nothing can open, and lets everything else know of several together.

    Between two other steps it stays open: whoever changes what it relies on, but for the settings and the model, which
    it watches itself, has to `close` it. Whoever reads what steps leave behind has it `settle` first.
    """

    def __init__(self, pair: Pair, history: History) -> None:
        self._pair, self._history = pair, history
        self._fruitless = self._pause = 0
        self._open = self._taking = self._is_to_close = self._watched = False
        self._lock = threading.RLock()  # a handler of a signal may want to read
        self._assignments = self._until = self._room = 0
        self._band, self._low, self._high = (math.inf, -math.inf), math.inf, -math.inf
        self._table: ParameterTable
        self._plan: Any
        self._common: Common
        self._stretch: Stretch
        self._reports: list[StepReport] = []
        _everyone.add(self)

    def take(self, loss: Tensor | float | None, epoch: int | None, batch: object) -> StepReport | None:
        """Look at the gradients of a step that is usual; else return None, and leave them as they are."""
        if not self._open:
            return None
        # In one piece, since beside a training each call costs about a microsecond.
        pair = self._pair
        with self._lock:
            self._taking = True
            try:
                step, table = pair.step_count + 1, self._table
                stretch, slot = self._stretch, len(self._reports)
                if (
                    step >= self._until
                    or slot >= self._room  # what should have been settled was interrupted
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
                if len(stretch.entries) > slot:  # one was interrupted
                    del stretch.entries[slot:]
                norm = self._plan.look(list(map(_grad, table.params)), slot, self._low, self._high)
                if not norm > 0:
                    return None
                report = StepReport.deferred(
                    partial(stretch.fields, slot), step=step, epoch=epoch, source=pair.name, time=now(), batch=batch
                )
                limit, log_norm = self._limit, log(norm)
                rate = 0.0 if limit is None else pair.clipper.engage(limit / (norm + self._epsilon) < 1.0)
                stretch.entries.append((loss, norm, log_norm, rate, pair.stepping.rates()))
                pair.step_count = step
                self._reports.append(report)  # from here on the step has been made, whatever passes
                self._fruitless = 0
                low, high = self._band
                self._low = low if low > log_norm - _STEP else log_norm - _STEP
                self._high = high if high < log_norm + _STEP else log_norm + _STEP
            finally:
                self._taking = False
            if self._watched and pair.judgement.startles(log_norm, loss):
                self._startle()
            elif self._is_to_close:
                self.close()
            elif slot + 1 >= self._room:
                self.settle()
                self._refresh()
        return report

    def open(self, grads: Gradients, outcome: Outcome) -> None:
        """Take the next steps where they may be usual, after this one, which has set everything up for them."""
        if self._pause:  # the last ones after which it was open were all unusual
            self._pause -= 1
            return
        pair, config, count = self._pair, self._pair.config, assignments.count
        clips, clip_type = config.enable_gradient_clipping, config.effective_clip_type
        if not (
            grads.as_planned
            and pair.step_count >= _FIRST
            and outcome.scale is None
            and config.enable_gradient_monitoring
            and config.check_frequency == 1
            and not (config.debug_mode or config.per_rank)
            and (clip_type == "norm" or not clips)
            and pair.is_plain
        ):
            return
        layout, limit = grads.layout, config.max_grad_norm if clips else None
        self._plan, self._table = layout.plan, pair.table
        self._limit, self._epsilon = limit, pair.clipper.epsilon
        self._chosen = limit if has_chosen_limit(config) else None
        self._common = Common(
            layout,
            pair.table.aliases,
            config.grad_track_per_weight_matrix,
            config.track_parameters,
            clip_type,
            limit,
            self._epsilon,
            {"action": "none" if config.enable_nan_inf_check else "off"},
        )
        self._plan.limit(math.inf if limit is None else limit, self._epsilon)
        self._assignments = count
        self._fruitless += 1
        self._pause = min(self._fruitless, _LONGEST_PAUSE) if self._fruitless > _PATIENCE else 0
        self._refresh()

    def close(self) -> None:
        """Let all know of what waits, and take no step until opened."""
        if not self._open:
            return
        with self._lock:
            self._is_to_close = self._taking  # a handler of a signal does so: the step is taken first
            if not self._taking:
                self.settle()
                self._open, self._until = False, 0

    def settle(self) -> None:
        """Let all know of the steps that wait."""
        if not self._open:
            return
        with self._lock:
            stretch = self._stretch
            if self._taking or not self._reports:
                return
            reports, self._reports = self._reports, []
            del stretch.entries[len(reports) :]
            stretch.leave()
            self._stretch = Stretch(self._common, self._plan.results)
            self._room -= len(reports)
            self._take_in(stretch, reports)

    def _take_in(self, stretch: Stretch, reports: list[StepReport]) -> None:
        pair, limit, epsilon = self._pair, self._limit, self._epsilon
        calm, norms, known = list[CalmStep](), list[ClippedNorm](), list[Known]()
        for loss, norm, log_norm, _, _ in stretch.entries:
            coefficient = 1.0 if limit is None else min(limit / (norm + epsilon), 1.0)
            clipped = coefficient < 1.0
            calm.append(CalmStep(log_norm, loss, self._chosen, clipped))
            norms.append((norm, norm * coefficient))
            known.append((norm, clipped, False, True))
        if limit is not None:
            pair.clipper.observe(norms)
        pair.judgement.take_in(calm, stretch.common.layout.missing)
        pair.flight.push(reports, stretch.facts, stretch.shrink)
        pair.monitor.keep(*reports)
        self._history.extend(reports, known, size=pair.config.max_gradient_history)

    def _refresh(self) -> None:
        """Find out how many steps may come, and between which norms they have to be."""
        pair, health = self._pair, self._pair.monitor.health
        self._room = min(health.room, self._plan.num_slots)
        following = pair.step_count + 1
        every = pair.config.grad_log_every_n_steps
        self._until = following + (every - following % every) % every
        self._watched = bool(pair.analyzers.running)
        if self._watched and self._room:  # what is due at a step is placed at the end of the one before
            self._until = min(self._until, pair.analyzers.quiet_until(following, self._room + 1) - 1)
        self._band = max(health.band[0], _LOWEST), min(health.band[1], self._ceiling())
        self._low, self._high = max(health.low, self._band[0]), min(health.high, self._band[1])
        self._open = self._room > 0 and following < self._until
        self._stretch = Stretch(self._common, self._plan.results)

    def _ceiling(self) -> float:
        """Return ln of the norm of which clipping would leave so little that it is judged at once."""
        limit, epsilon = self._limit, self._epsilon
        if limit is None:
            return math.inf
        highest = limit / LEAST_LEFT - epsilon
        return math.log(highest) - SLACK if highest > 0 else -math.inf

    def enter_child(self) -> None:
        """Go on in a forked copy of the process, whose parent's threads may have held the lock."""
        self._lock, self._taking = threading.RLock(), False

    def _startle(self) -> None:
        """Let the analyzers look at the next step, which then is not a usual one."""
        pair = self._pair
        self.close()
        pair.analyzers.alert(pair.step_count + 1)
        pair.analyzers.arm(pair.model, pair.step_count + 1)


def _enter_child() -> None:
    for one in list(_everyone):
        one.enter_child()


if hasattr(os, "register_at_fork"):  # which Windows has not
    os.register_at_fork(after_in_child=_enter_child)
