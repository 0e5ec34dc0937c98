"""The interface of an analyzer, the snapshot of a step that it gets, and the schedules of its looks."""

from __future__ import annotations

import itertools
import operator
import statistics
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from gradtrack.errors import InputTypeError, UsageError
from gradtrack.records import Panel, PanelKind
from gradtrack.reports import Issue, IssueType, Report, StepReport
from gradtrack.support.state import Stateful

Schedule = Callable[[int], bool]
OFTEN_EVERY = 4
OFTEN_UNTIL = 64
_AROUND = 5
_LONG = 10
_NO_HIGHER = 1.25
_BLOWN = 3.0
_RISEN = 3.0
_STUCK = 0.9


def often(step: int) -> bool:
    """Say whether cheap evidence is due: every 4th step up to 64, then every 64th."""
    return step % (OFTEN_EVERY if step <= OFTEN_UNTIL else OFTEN_UNTIL) == 0


def rarely(step: int) -> bool:
    """Say whether a costly analysis is due: at steps 2, 8, 32, 128 and 512, then at every 1000th."""
    return step in (2, 8, 32, 128, 512) or step % 1000 == 0


def always(step: int) -> bool:
    """Say that every step is due."""
    return True


def check_count(name: str, value: object, what: str, remedy: str) -> int:
    """Return a whole number from 1 on, or refuse what is none."""
    text = f"{name} {value!r}: expected a whole number of {what}, at least 1. {remedy}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputTypeError(text)
    number = operator.index(value)
    if number < 1:
        raise UsageError(text)
    return number


def check_horizon(horizon: object) -> int | None:
    """Return over how many time steps a model has to remember, or refuse what is no such number."""
    remedy = "Pass over how many steps the task has to remember, or leave it out."
    return None if horizon is None else check_count("horizon", horizon, "time steps", remedy)


class Series(Stateful):
    """The loss and gradient norm of the first and the last steps as plain numbers, the newest last.

    `log_norms` are ln of the norm, NaN where it was not finite; `missing` counts for each parameter the steps on which
    it had no gradient at all, and `missing_since` has the step from which on it has had none. `levels` are the middles
    of the losses up to some steps, the fewer the longer ago, since a verdict must not change by forgetting.
    """

    FIRST = 16
    LAST = 512
    kept_in_checkpoints = (
        "num_steps",
        "first_losses",
        "losses",
        "levels",
        "first_log_norms",
        "log_norms",
        "nonfinite_steps",
        "missing",
        "missing_since",
    )

    def __init__(self) -> None:
        self.num_steps = 0
        self.first_losses: list[float] = []
        self.losses: deque[float] = deque(maxlen=self.LAST)
        self.levels: list[tuple[int, float]] = []
        self.first_log_norms: list[float] = []
        self.log_norms: deque[float] = deque(maxlen=self.LAST)
        self.nonfinite_steps = 0
        self.missing: Counter[str] = Counter()
        self.missing_since: dict[str, int] = {}

    def append(self, log_norm: float, loss: float | None, missing: Sequence[str], *, finite: bool) -> None:
        """Add the loss and the norm of one step."""
        step = self.num_steps = self.num_steps + 1
        if loss is not None:
            self.losses.append(loss)
            if step <= self.FIRST or len(self.first_losses) < self.FIRST:
                self.first_losses.append(loss)
        self.log_norms.append(log_norm)
        if step <= self.FIRST:
            self.first_log_norms.append(log_norm)
        if not finite:
            self.nonfinite_steps += 1
        if missing:
            self.missing.update(missing)
        if missing or self.missing_since:
            self.missing_since = {name: self.missing_since.get(name, step) for name in missing}
        if not step % OFTEN_EVERY and often(step):
            self._keep_level()

    def extend(self, log_norms: Sequence[float], losses: Sequence[float | None], missing: Sequence[str]) -> None:
        """Add the losses and the finite norms of several steps, as `append` does one by one."""
        known = [loss for loss in losses if loss is not None]
        is_full = self.num_steps >= OFTEN_UNTIL and len(self.first_losses) == self.FIRST and len(known) == len(losses)
        keeps_no_level = self.num_steps % OFTEN_UNTIL + len(losses) < OFTEN_UNTIL
        if is_full and keeps_no_level and not (missing or self.missing_since):
            self.num_steps += len(losses)
            self.losses.extend(known)
            self.log_norms.extend(log_norms)
            return
        for log_norm, loss in zip(log_norms, losses, strict=True):
            self.append(log_norm, loss, missing, finite=True)

    @property
    def has_halved(self) -> bool:
        """Say whether the loss is under half of what it was at first."""
        return self.num_steps >= 2 * _AROUND and self._is_half_of_first(self._loss_at(self.num_steps))

    @property
    def blew_up(self) -> bool:
        """Say whether the loss of the first steps was soon three times that of the very first."""
        first = self.first_losses[:_AROUND]
        return len(first) == _AROUND and 0 < _BLOWN * first[0] < statistics.median(first)

    def has_risen_after(self, step: int) -> bool:
        """Say whether the loss is three times what it was at best before a step."""
        before = self._levels(0, step, _LONG)
        return bool(before) and 0 < _RISEN * min(before) < statistics.median(list(self.losses)[-_LONG:])

    def has_halved_since(self, step: int) -> bool:
        """Say whether the loss has halved since a step; since the first ones where it was not known yet."""
        if step < _AROUND:
            return self.has_halved
        before, last = self._loss_at(step), self._loss_at(self.num_steps)
        return before is not None and last is not None and 0 < last < 0.5 * before and self._is_over(step)

    def is_stuck_since(self, step: int) -> bool:
        """Whether the loss is known to have come down by less than a tenth since a step."""
        before, last = self._loss_at(step), self._loss_at(self.num_steps)
        return before is not None and last is not None and last > _STUCK * before > 0

    def has_learned_since(self, step: int) -> bool:
        """Say whether training went well since a step: the loss has halved, or is half of the first, and never rose."""
        before, last = self._loss_at(step), self._loss_at(self.num_steps)
        if before is None or last is None or not self._is_over(step):
            return False
        num_forgotten = self.num_steps - len(self.losses)
        since = [level for at, level in self.levels if step < at <= num_forgotten]
        if max(since + self._levels(step, self.num_steps, _AROUND), default=last) > _NO_HIGHER * before:
            return False
        return self.has_halved_since(step) or self._is_half_of_first(last)

    def _levels(self, after: int, until: int, width: int) -> list[float]:
        """Return the middles of the losses of successive steps between two steps."""
        ends = [max(0, len(self.losses) - (self.num_steps - step)) for step in (after, until)]
        found = list(itertools.islice(self.losses, *ends))
        return [statistics.median(found[at : at + width]) for at in range(0, len(found) - width + 1, width)]

    def _is_over(self, step: int) -> bool:
        """Whether none of the last losses are of a step or before it."""
        return self.num_steps - step >= _AROUND

    def _is_half_of_first(self, loss: float | None) -> bool:
        first = self.first_losses[:_AROUND]  # of which the middle is high where the very first steps did harm
        return loss is not None and 0 < loss < 0.5 * min(first[0], statistics.median(first))

    def _loss_at(self, step: int) -> float | None:
        """Return the middle of the losses up to a step, or up to the last one before it of which it was kept."""
        end = len(self.losses) - (self.num_steps - step)
        if end >= _AROUND:
            return statistics.median(itertools.islice(self.losses, end - _AROUND, end))
        return next((level for at, level in reversed(self.levels) if at <= step), None)

    def _keep_level(self) -> None:
        level = self._loss_at(self.num_steps)
        if level is not None:
            self.levels.append((self.num_steps, level))
        if len(self.levels) > self.LAST:
            del self.levels[1::2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One training step after its backward pass, to be read and never changed.

    `gradients` are those that the optimizer will see, by parameter name; `norms` are the pre-clip norms, and `groups`
    the group of each. `loss_graph` is the node of autograd that computed the loss, of the last micro-batch, where the
    step was given it as a tensor. `call_before_step(look)` calls `look()` once, just before an optimizer takes its
    gradients. The parameters with the ids in `elsewhere` belong to other pairs of the same model.

    Where ranks share the parameters, `gradients` are the parts that are here, `counts_as` says for each parameter how
    often a sum over the ranks is to count what is here, and `sums` is what they have added up for this analyzer.
    """

    step: int
    model: nn.Module
    epoch: int | None = None
    loss: float | None = None
    optimizers: Sequence[Any] = ()
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    lr: Mapping[str, float] = field(default_factory=dict)
    horizon: int | None = None
    skipped: bool = False
    scaled: bool = False
    series: Series | None = None
    loss_graph: Any = None
    call_before_step: Callable[[Callable[[], None]], None] | None = None
    elsewhere: Container[int] = ()
    counts_as: Mapping[str, float] | None = None
    sums: Sequence[float] | None = None

    def params(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the model by name, without those that belong to other pairs."""
        return {name: param for name, param in self.model.named_parameters() if id(param) not in self.elsewhere}


def panel(title: str, *metrics: str, log_scale: bool = False) -> Panel:
    """Return the chart of metrics of one section, with a line for each."""
    several = len(metrics) > 1 or metrics[0].endswith("/*")
    section = metrics[0].partition("/")[0]
    kind: PanelKind = "multi-line" if several else "line"
    return Panel(title=title, section=section, metrics=metrics, kind=kind, log_scale=log_scale)


class Picture(NamedTuple):
    """A picture of an analyzer: its file name without the ending, what it shows, and whether a chart shows the same."""

    name: str
    about: str
    is_charted: bool = False


class DefaultThreshold(float):
    """A threshold that the user left at its default: it shows the usual value, but scale-free rules judge instead."""


class Analyzer(ABC):
    """A plugin that measures more than the gradients, with a typed report and panels of its own.

    An analyzer is one folder or file with one class. On the steps of its schedule it is armed before the forward pass
    and inspects after the backward pass; in between those steps it leaves no hook on the model. It changes neither
    weights, buffers, gradients nor the state of any random generator.
    """

    report_type: ClassVar[type[Report]] = Report
    panels: ClassVar[tuple[Panel, ...]] = ()
    picture: ClassVar[Picture | None] = None
    """What `pictures` draws, if it draws anything."""
    explained_by: ClassVar[Mapping[IssueType, tuple[IssueType, ...]]] = {}
    """What may explain the types of issues that this analyzer alone finds, the likeliest first."""
    schedule: ClassVar[Schedule] = staticmethod(rarely)
    needs_whole_parameters: ClassVar[bool] = False
    """Whether a look computes with the parameters themselves, which then must not be spread over ranks."""
    foresees: ClassVar[bool] = False
    """Whether a `due` of its own tells ahead of steps what it will say then, until the next look or placing of hooks.
    The schedule alone always does."""
    adds_up: ClassVar[bool] = False
    """Whether what it has to say follows from sums, which ranks that share the parameters then add up for it."""
    observes_actions: ClassVar[bool] = False
    """Whether it has a method `observe`, which a loop shows the distribution of a policy's actions."""
    looks_every: int | None = None
    """The number of steps from look to look, where the setting `every` has replaced the schedule."""

    @classmethod
    def suits(cls, model: nn.Module) -> str | None:
        """Return why `analyzers: auto` should choose this analyzer for a model, or None."""
        return None

    def due(self, step: int) -> bool:
        """Say whether a step is to be looked at."""
        return self.scheduled(step)

    def scheduled(self, step: int) -> bool:
        """Say whether a step is one of the schedule, or of the cadence that `every` has put in its place."""
        every = self.looks_every
        return type(self).schedule(step) if every is None else step % every == 0

    def check(self, model: nn.Module) -> None:
        """Raise `UsageError` where an option names something that a model does not have; called when it is attached."""

    def arm(self, model: nn.Module) -> None:
        """Place the hooks that the next step needs."""

    def before_backward(self, loss: Tensor) -> None:
        """Look at a loss of the step, of each micro-batch, while its graph still has what the backward pass frees.

        It is not called where the loop runs the backward pass by itself, nor where the step became due after `arm`.
        """

    def num_sums(self, step: int, num_groups: int) -> int:
        """Return how many numbers ranks add up at a step, which must follow from the arguments alone."""
        return 0

    def sums(self, snapshot: Snapshot, groups: Sequence[str]) -> Sequence[float]:
        """Return as many numbers, before the gradients are clipped; or none, so that all ranks go without.

        `groups` are the names of all groups, or none where their numbers would be too many to send.
        """
        return ()

    @abstractmethod
    def inspect(self, snapshot: Snapshot) -> Report | None:
        """Inspect a step and return the report on it, or None without evidence.

        A report on an earlier step is a `LateReport`, and is recorded under that step.
        """

    def disarm(self) -> None:
        """Remove every hook; a second call does nothing."""

    def notes(self) -> list[str]:
        """Return findings of the last look that are information, not issues."""
        return []

    def limitation(self) -> str | None:
        """Return why the last look saw nothing and what would help, as words that follow "because"; None if it saw."""
        return None

    def issues(self) -> list[Issue]:
        """Return the issues that the looks so far show; `manager.diagnose()` joins and orders those of all analyzers.

        The list is about the run up to now, so that a fault which is over is still in it where it did harm. It never
        holds INFO findings (those are `notes`), and it is the same at every loss scale. Asking changes nothing.
        """
        return []

    @classmethod
    def pictures(cls, reports: Sequence[StepReport]) -> Mapping[str, Callable[[Path], Path]]:
        """Return the functions that draw the pictures of this analyzer, by file name without the ending.

        `reports` are the last ones of one (model, optimizer) pair, those of this analyzer among their `analyzers`.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return all state that later looks depend on, as plain data."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""


def model_of(analyzer: Analyzer, model: nn.Module | None) -> nn.Module:
    """Return the model that an analyzer was made with, which an offline analysis needs.

    Of a compiled model it is the one that it was made from.
    """
    name = type(analyzer).__name__
    if model is None:
        raise UsageError(f"{name} has no model: expected one to analyze. Construct {name}(model).")
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"{name} of {type(model).__name__}: expected a torch.nn.Module.")
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model
