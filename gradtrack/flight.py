"""The flight recorder: the last steps, with every parameter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from gradtrack.facts import StepFacts
from gradtrack.reports import StepReport

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
