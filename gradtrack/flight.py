"""The flight recorder: the last steps, with every parameter."""

from __future__ import annotations

from collections import deque
from typing import Final

from gradtrack.facts import StepFacts
from gradtrack.reports import StepReport

_STEPS: Final = 8


class FlightRecorder:
    """Keeps the last steps in full; of a step that falls out only the sums stay in its report."""

    def __init__(self) -> None:
        self._steps: deque[tuple[StepReport, StepFacts]] = deque(maxlen=_STEPS)

    def push(self, report: StepReport, facts: StepFacts) -> None:
        """Take in a step."""
        steps = self._steps
        if len(steps) == _STEPS:
            steps[0][1].shrink()
        steps.append((report, facts))

    def read(self) -> list[StepReport]:
        """Return the last steps with the statistics of every parameter, the newest last."""
        return [_in_full(report, facts) for report, facts in self._steps]


def _in_full(report: StepReport, facts: StepFacts) -> StepReport:
    return StepReport.model_validate({**dict(report.resolve()), "parameters": facts.parameters()})
