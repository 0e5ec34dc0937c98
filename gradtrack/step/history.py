"""What a training keeps in memory: its last reports, the sums of its summary, and its last steps in full."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gradtrack.reports import (
    ClippingSummary,
    GradientSummary,
    HealthSummary,
    NanInfSummary,
    NormSummary,
    StepReport,
    TrainingSummary,
)
from gradtrack.step.data import StepFacts

_MOST_NOT_SUMMED: Final = 32
_COUNTERS = ("steps", "norms", "unhealthy", "nan", "inf", "nonfinite", "replaced", "skipped", "clipped")


Known = tuple[float | None, bool, bool, bool]
"""The norm of a step, and whether it was clipped, skipped and healthy."""


class History:
    """The last reports of a training, and running sums over all of it."""

    def __init__(self, size: int) -> None:
        self.reports: deque[StepReport] = deque(maxlen=size)
        self._not_summed: deque[Known] = deque()
        """The norms of the last steps, and whether they were clipped, skipped and healthy."""
        self._summing = threading.RLock()  # a handler of a signal may ask for the summary
        self._count: Counter[str] = Counter()
        self._issues: Counter[str] = Counter()
        self._mean = self._squares = self._last = 0.0
        self._min, self._max = math.inf, -math.inf

    @property
    def num_steps(self) -> int:
        """Return how many steps were taken in."""
        return self._count["steps"] + len(self._not_summed)

    def append(
        self,
        report: StepReport,
        *,
        size: int,
        norm: float | None,
        clipped: bool,
        skipped: bool,
        healthy: bool,
    ) -> None:
        """Take in the report of a step, of which so many are kept, and what of it is known without resolving it."""
        self.extend([report], [(norm, clipped, skipped, healthy)], size=size)

    def extend(self, reports: Sequence[StepReport], known: Sequence[Known], *, size: int) -> None:
        """Take in the reports of steps, and what is known of each."""
        if self.reports.maxlen != size:
            self.reports = deque(self.reports, maxlen=size)
        self.reports.extend(reports)
        self._not_summed.extend(known)
        if len(self._not_summed) >= _MOST_NOT_SUMMED:
            self._sum_up()

    def add_nonfinite(self, nan_inf: Mapping[str, Any]) -> None:
        """Count the non-finite elements of a step that had some."""
        self._count["nonfinite"] += 1
        self._count["nan"] += nan_inf["nan_count"]
        self._count["inf"] += nan_inf["inf_count"]
        self._count["replaced"] += nan_inf.get("replaced_count", 0)

    def add_issue(self, kind: str) -> None:
        """Count a step on which an issue of this type was open."""
        self._issues[kind] += 1

    def summary(self) -> TrainingSummary:
        """Sum up the training so far."""
        self._sum_up()
        count = self._count
        known = count["norms"]
        norms = NormSummary(
            count=known,
            mean=self._mean,
            std=math.sqrt(self._squares / (known - 1)) if known > 1 else 0.0,
            min=self._min if known else 0.0,
            max=self._max if known else 0.0,
            last=self._last,
        )
        return TrainingSummary(
            total_steps=count["steps"],
            gradient_statistics=GradientSummary(gradient_norms=norms),
            health_issues=HealthSummary(unhealthy_steps=count["unhealthy"], issues=dict(self._issues)),
            nan_inf_summary=NanInfSummary(
                nan_count=count["nan"],
                inf_count=count["inf"],
                nonfinite_steps=count["nonfinite"],
                total_replacements=count["replaced"],
                skipped_steps=count["skipped"],
            ),
            clipping_summary=ClippingSummary(
                clipped_steps=count["clipped"],
                clip_rate=count["clipped"] / count["steps"] if count["steps"] else 0.0,
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, as plain data; reports are not part of a checkpoint."""
        self._sum_up()
        return {
            "count": {name: self._count[name] for name in _COUNTERS},
            "issues": dict(self._issues),
            "norms": [self._mean, self._squares, self._last, self._min, self._max],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._not_summed.clear()
        self._count = Counter(state["count"])
        self._issues = Counter(state["issues"])
        self._mean, self._squares, self._last, self._min, self._max = (float(value) for value in state["norms"])

    def _sum_up(self) -> None:
        """Add the last steps to the sums; a thread that trains may take in more of them meanwhile."""
        with self._summing:
            self._add([self._not_summed.popleft() for _ in range(len(self._not_summed))])

    def _add(self, found: Sequence[Known]) -> None:
        if not found:
            return
        count = self._count
        norms, clipped, skipped, healthy = zip(*found, strict=True)
        count["steps"] += len(found)
        count["clipped"] += sum(clipped)
        count["skipped"] += sum(skipped)
        count["unhealthy"] += len(found) - sum(healthy)
        for norm in norms:
            if norm is not None and math.isfinite(norm):
                self._add_norm(norm)

    def _add_norm(self, norm: float) -> None:
        count = self._count["norms"] = self._count["norms"] + 1
        change = norm - self._mean
        self._mean += change / count
        self._squares += change * (norm - self._mean)
        self._last = norm
        if norm < self._min:
            self._min = norm
        if norm > self._max:
            self._max = norm


_STEPS: Final = 8


class FlightRecorder:
    """Keeps the last steps in full; of a step that falls out only the sums stay in its report."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Sequence[StepReport], Callable[[int], StepFacts], Callable[[], object]]] = deque()

    def push(
        self, reports: Sequence[StepReport], facts: Callable[[int], StepFacts], shrink: Callable[[], object]
    ) -> None:
        """Take in steps, with what returns the facts of each; `shrink` is called when all of them have fallen out."""
        kept = self._kept
        kept.append((reports, facts, shrink))
        # Counted anew, so that an exception between two lines leaves nothing that contradicts the steps.
        while sum(len(found) for found, _, _ in kept) - len(kept[0][0]) >= _STEPS:
            kept.popleft()[2]()

    def read(self) -> list[StepReport]:
        """Return the last steps with the statistics of every parameter, the newest last."""
        steps = [(report, facts(index)) for reports, facts, _ in self._kept for index, report in enumerate(reports)]
        return [_in_full(report, found) for report, found in steps[-_STEPS:]]


def _in_full(report: StepReport, facts: StepFacts) -> StepReport:
    return StepReport.model_validate({**dict(report.resolve()), "parameters": facts.parameters()})
