"""The verdict on a sampled run: all rules over its samples, kept verdicts of units, and the user's limits."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gradtrack.analyzers.base import Series
from gradtrack.analyzers.flow.rules import depth, imbalance, learning_rate, precision, reach, steps, units
from gradtrack.analyzers.flow.samples import KEPT_WINDOWS, RECENT, Case, ParameterSample
from gradtrack.health.open_issues import MOST, order
from gradtrack.reports import Issue, IssueType

EXPLAINED_BY: Final[Mapping[IssueType, tuple[IssueType, ...]]] = {
    IssueType.LR_TOO_HIGH: (IssueType.LR_NEGATIVE, IssueType.STALE_GRAD, IssueType.ROTATION, IssueType.SUPERCRITICAL),
    IssueType.DEAD: (IssueType.EQUAL_UNITS, IssueType.LR_TOO_HIGH, IssueType.EXPLODING),
    IssueType.SATURATION: (IssueType.LR_TOO_HIGH, IssueType.EXPLODING),
    IssueType.BOTTLENECK: (IssueType.EQUAL_UNITS, IssueType.DEAD, IssueType.SATURATION),
    IssueType.GRAD_IMBALANCE: (IssueType.EXPLODING, IssueType.VANISHING, IssueType.SUPERCRITICAL, IssueType.DEAD),
    IssueType.LR_TOO_LOW: (
        IssueType.VANISHING,
        IssueType.UNCHANGED,
        IssueType.DEAD,
        IssueType.SATURATION,
        IssueType.CLIP_SATURATED,
        IssueType.DISCONNECTED,
    ),
}

_OF_STEPS: Final = (IssueType.LR_TOO_HIGH,)
"""What is about the steps that were made, and not about what they have made of the model."""

_PLATEAUS: Final = (IssueType.VANISHING,)
"""What holds a training up, and so is over once the training has come out of it."""


_Judges = tuple[Callable[[Case], Iterable[Issue]], ...]
_OF_THE_RUN: Final[_Judges] = (
    reach.judge_disconnected,
    reach.judge_mode,
    units.judge_equal_units,
    units.judge_copies,
    learning_rate.judge_negative_rate,
    steps.judge_first_steps,
    steps.judge_foreign_clip,
    precision.judge_origin,
    steps.judge_oscillation,
    learning_rate.judge_rate_low,
    steps.judge_rotation,
    precision.judge_rounding,
    reach.judge_stale_grad,
    reach.judge_unchanged,
)
_OF_GRADIENTS: Final[_Judges] = (depth.judge_depth, imbalance.judge_imbalance)
"""The rules about a state of the model, and so about every window of samples, of which each is judged once."""

_OF_UNITS: Final[_Judges] = (depth.judge_bottleneck, units.judge_dead, units.judge_saturation)
"""The rules that look at the units of the last samples alone, and judge each window when it is there."""


def diagnose(case: Case, most: int = MOST) -> list[Issue]:
    """Return what is wrong with a run, root causes first.

    A rule about a state of the model looks at every window of the last samples, so that a fault which was there and has
    healed, or has been overtaken by its consequences, is still found. What was not there in the window before, and has
    come while training went well, is what the training made of the model, and no fault; nor is a plateau that the
    training has left behind, with the loss halved since.
    """
    found: dict[str, Issue] = {issue.key: issue for issue in case.standing}
    there: set[str] = set()
    may_be_high = learning_rate.may_be_high(case)
    for number, window in enumerate(case.windows):
        judged = [*_of_gradients(window), *(learning_rate.judge_rate_high(window) if may_be_high else ())]
        there = {issue.key for issue in judged}
        for issue in judged:
            known = found.get(issue.key)
            if known is not None:
                found[issue.key] = issue.model_copy(update={"step": known.step})
            elif not number or not _came_well(issue, window):
                found[issue.key] = issue
    lasting = [issue for key, issue in found.items() if key in there or not _is_left_behind(issue, case)]
    return order([*lasting, *_judge(case, _OF_THE_RUN)], most)


def _of_gradients(window: Case) -> list[Issue]:
    """Judge the gradients of a window, once for all the looks at which it is among the last."""
    known = ("gradients", window.trend.learned)
    return window.samples[-1].remembered(known, lambda _: _judge(window, _OF_GRADIENTS))


def _came_well(issue: Issue, window: Case) -> bool:
    """Whether a state was not there at first, and has come while training went well."""
    if issue.issue_type in _OF_STEPS or window.before is None:
        return False
    return window.series.has_learned_since(window.before)


def _is_left_behind(issue: Issue, case: Case) -> bool:
    over = issue.issue_type in _PLATEAUS
    return over and (case.series.has_halved_since(issue.step) or depth.has_recovered(case, issue.layer))


def _judge(case: Case, judges: _Judges) -> list[Issue]:
    return [issue for judge in judges for issue in judge(case)]


class UnitVerdicts:
    """The verdicts of the rules about units on the last windows, so that the numbers of units can be dropped."""

    def __init__(self) -> None:
        self._found: deque[list[Issue]] = deque(maxlen=KEPT_WINDOWS + 1)
        self._absent: dict[str, int | None] = {}
        self._told: dict[str, int | None] = {}
        self._standing: list[Issue] | None = None

    def add(self, case: Case) -> None:
        """Judge the newest window, and let go of what only older ones needed."""
        case.standing = self._found[-1] if self._found else ()
        found = _judge(case, _OF_UNITS)
        known = {issue.key for issue in case.standing}
        self._absent |= {issue.key: case.before for issue in found if issue.key not in known}
        self._found.append(found)
        here = {issue.key for issues in self._found for issue in issues}
        told: dict[str, int | None] = {issue.key: case.step for issue in self.issues(case.series)}
        for key, step in self._told.items():
            if key in here:
                told[key] = None if step is None or case.series.has_halved_since(step) else step
        self._told = told
        self._standing = self.issues(case.series)
        for sample in case.samples[: 1 - RECENT]:
            for node in sample.nodes:
                node.unit_max = node.unit_min = node.gram = None

    def standing(self, series: Series) -> list[Issue]:
        """Return the issues as they were at the last window: the luck of the losses since then changes none."""
        return self.issues(series) if self._standing is None else self._standing

    def issues(self, series: Series) -> list[Issue]:
        """Return each issue as it was found last, with the step at which it was found first.

        What was not there at first and has come while training went well is what the training made of the model, and
        what the loss has halved with all the same holds nothing up. Dead units that were told of are so until they
        respond or the loss has halved since, and not again after that.
        """
        merged: dict[str, Issue] = {}
        for found in self._found:
            for issue in found:
                known = merged.get(issue.key)
                merged[issue.key] = issue if known is None else issue.model_copy(update={"step": known.step})
        return [issue for issue in merged.values() if not self._came_well(issue, series)]

    @property
    def from_start(self) -> frozenset[str]:
        """Return the keys of the issues that were there when units were judged first."""
        return frozenset(key for key, absent in self._absent.items() if absent is None)

    def _came_well(self, issue: Issue, series: Series) -> bool:
        if issue.issue_type is IssueType.BOTTLENECK:  # which is none where the loss has halved with it
            return series.has_halved
        absent = self._absent.get(issue.key)
        if absent is None or issue.issue_type is IssueType.SATURATION:  # which is judged by what comes through
            return False
        if issue.key in self._told:
            return self._told[issue.key] is None
        return series.has_learned_since(absent)

    def state_dict(self) -> dict[str, Any]:
        """Return the verdicts as plain data."""
        found = [[issue.model_dump(mode="json") for issue in found] for found in self._found]
        standing = None if self._standing is None else [issue.model_dump(mode="json") for issue in self._standing]
        return {"found": found, "absent": dict(self._absent), "told": dict(self._told), "standing": standing}

    def load_state_dict(self, state: Mapping[str, Any] | list[list[Mapping[str, Any]]]) -> None:
        """Take back what `state_dict` returned, also that of older versions, which was the verdicts alone."""
        verdicts = state["found"] if isinstance(state, Mapping) else state
        self._found.clear()
        self._found.extend([Issue.model_validate(issue) for issue in found] for found in verdicts)
        if isinstance(state, Mapping):
            self._absent, self._told = dict(state["absent"]), dict(state.get("told", ()))
        known = state.get("standing") if isinstance(state, Mapping) else None
        self._standing = None if known is None else [Issue.model_validate(issue) for issue in known]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits on the gradient norm of a parameter, its share of zeros, and its coefficient of variation."""

    vanishing: float | None = None
    exploding: float | None = None
    dead: float | None = None
    unstable_cv: float | None = None


def judge_absolutely(case: Case, thresholds: Thresholds) -> list[Issue]:
    """Return the parameters beyond the thresholds that were passed."""
    found: dict[str, list[ParameterSample]] = {}
    for sample in case.samples:
        for name, param in sample.params.items():
            found.setdefault(name, []).append(param)
    return [issue for name, params in found.items() for issue in _judge_parameter(case, name, params, thresholds)]


def _judge_parameter(case: Case, name: str, params: Sequence[ParameterSample], limits: Thresholds) -> Iterator[Issue]:
    norms = [param.norm for param in params if param.has_grad]
    if not norms:
        return
    mean = statistics.fmean(norms)
    spread = statistics.pstdev(norms) / mean if mean > 0 else 0.0
    for kind, statistic, value, limit, sign in (
        (IssueType.VANISHING, "mean_norm", mean, limits.vanishing, -1),
        (IssueType.EXPLODING, "max_norm", max(norms), limits.exploding, 1),
        (IssueType.DEAD, "zero_share", statistics.fmean(param.zeros for param in params), limits.dead, 1),
        (IssueType.UNSTABLE, "variation", spread, limits.unstable_cv, 1),
    ):
        if limit is not None and sign * value > sign * limit:
            yield case.issue(
                kind,
                name,
                (statistic, value, limit),
                f"The {statistic} of the gradient of {name} is {value:.3g}, beyond the limit {limit:g} set.",
                "An absolute limit moves with the scale of the loss: leave it out to be judged without.",
                window=len(norms),
                confidence=0.5,
            )
