"""DISCONNECTED: steps on which no parameter has a gradient at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from gradtrack.config import GradientConfig
from gradtrack.health.rule import ANY, Band, CalmStep, Evidence, Rule
from gradtrack.reports import Issue, IssueSeverity, IssueType

_PATIENCE: Final = 3
"""A loop may step once without a gradient, after a batch that was empty or left out."""


@final
class NoGradientsRule(Rule):
    """Opens when no parameter has a gradient on three steps in a row, and closes with the first gradient."""

    kept_in_checkpoints = ("streak",)

    def __init__(self) -> None:
        self.streak = 0

    def calm(self, config: GradientConfig) -> Band | None:
        return ANY

    def remember(self, steps: Sequence[CalmStep]) -> None:
        self.streak = 0

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        self.streak = 0 if evidence.layout.names else self.streak + 1
        if self.streak < _PATIENCE:
            return []
        return [
            Issue(
                issue_type=IssueType.DISCONNECTED,
                severity=IssueSeverity.HIGH,
                message=f"No parameter had a gradient on the last {self.streak} steps, so that nothing was trained.",
                statistic="steps_without_any_gradient",
                value=float(self.streak),
                threshold=float(_PATIENCE),
                window=self.streak,
                step=evidence.step,
                recommendation=(
                    "Look for a backward pass that is missing or over another model, "
                    "or for a zero_grad() between it and the step."
                ),
            )
        ]
