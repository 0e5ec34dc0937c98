"""Stage 5: history: the last reports, the running sums of the summary, and the flight recorder."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gradtrack.reports import (
    ClippingSummary,
    GradientSummary,
    HealthSummary,
    Issue,
    NanInfSummary,
    NormSummary,
    StepReport,
    TrainingSummary,
)
from gradtrack.step.data import StepData

_OF_STEPS: Final = ("steps", "norms", "unhealthy", "skipped", "clipped")
_OF_ELEMENTS: Final = ("nan", "inf", "nonfinite", "replaced")


class _Sums(NamedTuple):
    """Running sums over all steps. They are replaced as a whole, so an exception leaves the old or the new ones."""

    steps: int = 0
    norms: int = 0
    unhealthy: int = 0
    skipped: int = 0
    clipped: int = 0
    mean: float = 0.0
    squares: float = 0.0
    last: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    def plus(self, found: Sequence[float | None], clipped: int, skipped: int, unhealthy: int) -> _Sums:
        """Return the sums with the norms of further steps; mean and squares by Welford's method."""
        _, norms, _, _, _, mean, squares, last, least, most = self
        for norm in found:
            if norm is not None and math.isfinite(norm):
                norms += 1
                change = norm - mean
                mean += change / norms
                squares += change * (norm - mean)
                last = norm
                least = norm if norm < least else least
                most = norm if norm > most else most
        counts = self.steps + len(found), norms, self.unhealthy + unhealthy, self.skipped + skipped
        return _Sums(*counts, self.clipped + clipped, mean, squares, last, least, most)


class History:
    """The last reports of a training, and running sums over all of its steps."""

    def __init__(self, size: int) -> None:
        self.reports: deque[StepReport] = deque(maxlen=size)
        self._sums = _Sums()
        self._adding = threading.RLock()  # other threads may train another pair
        self._elements: Counter[str] = Counter()
        self._issues: Counter[str] = Counter()
        self.first_fault: list[StepReport] = []
        """The steps up to the first fault, each with the statistics of every parameter."""

    @property
    def num_steps(self) -> int:
        """Return how many steps there were."""
        return self._sums.steps

    def extend(
        self,
        reports: Sequence[StepReport],
        norms: Sequence[float | None],
        *,
        size: int,
        clipped: int = 0,
        skipped: int = 0,
        unhealthy: int = 0,
    ) -> None:
        """Add the reports of steps to the last `size` ones, and their numbers, known without reading, to the sums."""
        if self.reports.maxlen != size:
            self.reports = deque(self.reports, maxlen=size)
        self.reports.extend(reports)
        with self._adding:
            self._sums = self._sums.plus(norms, clipped, skipped, unhealthy)

    def add_nonfinite(self, nan_inf: Mapping[str, Any]) -> None:
        """Count the non-finite elements of a step that had some."""
        self._elements["nonfinite"] += 1
        self._elements["nan"] += nan_inf["nan_count"]
        self._elements["inf"] += nan_inf["inf_count"]
        self._elements["replaced"] += nan_inf.get("replaced_count", 0)

    def add_issue(self, kind: str) -> None:
        """Count a step on which an issue of this type was open."""
        self._issues[kind] += 1

    def add_faults(self, nan_inf: Mapping[str, Any], issues: Iterable[Issue]) -> None:
        """Count what was wrong with a step: its non-finite elements, and the issues that were open."""
        if "nan_count" in nan_inf:
            self.add_nonfinite(nan_inf)
        for issue in issues:
            self.add_issue(issue.issue_type.value)

    def replace(self, report: StepReport, later: StepReport, opened: Iterable[Issue]) -> None:
        """Replace a report by one with the verdict of the end of the run, and count what has opened with it."""
        for position, kept in enumerate(self.reports):
            if kept is report:
                self.reports[position] = later
        more = int(report.health.healthy) - int(later.health.healthy)
        self._sums = self._sums._replace(unhealthy=self._sums.unhealthy + more)
        for issue in opened:
            self.add_issue(issue.issue_type.value)

    def summary(self) -> TrainingSummary:
        """Sum up the training so far."""
        sums, elements = self._sums, self._elements
        norms = NormSummary(
            count=sums.norms,
            mean=sums.mean,
            std=math.sqrt(sums.squares / (sums.norms - 1)) if sums.norms > 1 else 0.0,
            min=sums.min if sums.norms else 0.0,
            max=sums.max if sums.norms else 0.0,
            last=sums.last,
        )
        return TrainingSummary(
            total_steps=sums.steps,
            gradient_statistics=GradientSummary(gradient_norms=norms),
            health_issues=HealthSummary(unhealthy_steps=sums.unhealthy, issues=dict(self._issues)),
            nan_inf_summary=NanInfSummary(
                nan_count=elements["nan"],
                inf_count=elements["inf"],
                nonfinite_steps=elements["nonfinite"],
                total_replacements=elements["replaced"],
                skipped_steps=sums.skipped,
            ),
            clipping_summary=ClippingSummary(
                clipped_steps=sums.clipped, clip_rate=sums.clipped / sums.steps if sums.steps else 0.0
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, as plain data; reports are not part of a checkpoint."""
        sums = self._sums
        steps = {name: getattr(sums, name) for name in _OF_STEPS}
        return {
            "count": {**steps, **{name: self._elements[name] for name in _OF_ELEMENTS}},
            "issues": dict(self._issues),
            "norms": [sums.mean, sums.squares, sums.last, sums.min, sums.max],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        count = Counter(state["count"])
        self._elements = Counter({name: count[name] for name in _OF_ELEMENTS})
        self._issues = Counter(state["issues"])
        self._sums = _Sums(*(count[name] for name in _OF_STEPS), *(float(value) for value in state["norms"]))


_STEPS: Final = 8


class _RecordedSteps(NamedTuple):
    reports: Sequence[StepReport]
    data: Callable[[int], StepData]
    shrink: Callable[[], object]
    end: int
    """The number of steps recorded up to and with these."""


class FlightRecorder:
    """Flight recorder: keeps the last steps with the statistics of every parameter; older reports keep only sums."""

    def __init__(self) -> None:
        self._kept: deque[_RecordedSteps] = deque()

    def push(
        self, reports: Sequence[StepReport], data: Callable[[int], StepData], shrink: Callable[[], object]
    ) -> None:
        """Record steps; `data` returns the data of each, and `shrink` is called when all of them are dropped."""
        kept = self._kept
        end = (kept[-1].end if kept else 0) + len(reports)
        kept.append(_RecordedSteps(reports, data, shrink, end))
        while end - kept[0].end >= _STEPS:
            kept.popleft().shrink()

    @property
    def last(self) -> tuple[StepReport, StepData] | None:
        """Return the last step; None before the first."""
        if not self._kept:
            return None
        steps = self._kept[-1]
        return steps.reports[-1], steps.data(len(steps.reports) - 1)

    def replace_last(self, report: StepReport) -> None:
        """Replace the report of the last step."""
        self._kept[-1] = self._kept[-1]._replace(reports=[*self._kept[-1].reports[:-1], report])

    def read(self) -> list[StepReport]:
        """Return the last steps with the statistics of every parameter, the newest last."""
        steps = [(report, data(index)) for reports, data, _, _ in self._kept for index, report in enumerate(reports)]
        in_full = ({**dict(report.resolve()), "parameters": found.parameters()} for report, found in steps[-_STEPS:])
        return [StepReport.model_validate(fields) for fields in in_full]
