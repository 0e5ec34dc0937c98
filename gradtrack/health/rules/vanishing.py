"""VANISHING: a norm that falls to almost zero while the loss does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, final

from gradtrack.config import GradientConfig
from gradtrack.health.rule import SLACK, Band, CalmStep, Evidence, Rule, beyond_limit
from gradtrack.reports import Issue, IssueSeverity, IssueType
from gradtrack.support.names import module_of

_REFERENCE_STEPS: Final = 10
_FALL: Final = math.log(1e-4)
_PATIENCE: Final = 5
_LEARNED: Final = 0.5


@final
class VanishingRule(Rule):
    """Opens when the norm stays below 1e-4 of what it was at first, though the loss is still above half of its start.

    A norm that falls because the loss falls is convergence. Without a loss the two cannot be told apart, so the issue
    is then LOW.
    """

    kept_in_checkpoints = ("first_norms", "first_losses", "streak")

    def __init__(self) -> None:
        self.first_norms: list[float] = []
        self.first_losses: list[float] = []
        self.streak = 0

    def calm(self, config: GradientConfig) -> Band | None:
        if len(self.first_norms) < _REFERENCE_STEPS:
            return None
        limit = config.vanishing_threshold
        return (max(max(self.first_norms) + _FALL, -math.inf if limit is None else math.log(limit)) + SLACK, math.inf)

    def remember(self, steps: Sequence[CalmStep]) -> None:
        self.streak = 0

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        found = beyond_limit(evidence, IssueType.VANISHING, config.vanishing_threshold)
        log_norm = evidence.log_norm
        if math.isnan(log_norm) or not evidence.layout.names:
            return found
        if len(self.first_norms) < _REFERENCE_STEPS and log_norm > -math.inf:
            self._learn(evidence, log_norm)
            return found
        if not self.first_norms:
            self.streak += 1
            return found or ([self._never(evidence)] if self.streak >= _PATIENCE else [])
        fall = log_norm - max(self.first_norms)
        small = fall < _FALL and not self._has_learned(evidence.loss)
        self.streak = self.streak + 1 if small else 0
        return found or ([self._issue(evidence, fall)] if self.streak >= _PATIENCE else [])

    def _learn(self, evidence: Evidence, log_norm: float) -> None:
        self.streak = 0
        self.first_norms.append(log_norm)
        if evidence.loss is not None and math.isfinite(evidence.loss):
            self.first_losses.append(evidence.loss)

    def _has_learned(self, loss: float | None) -> bool:
        """Whether the loss has gone down far enough to explain small gradients."""
        if loss is None or not self.first_losses:
            return False
        start = max(self.first_losses)
        return loss < _LEARNED * start if start > 0 else loss < start

    def _never(self, evidence: Evidence) -> Issue:
        """Report gradients that were zero from the first step on, at the first weight that should have had one."""
        layer = module_of(evidence.layout.names[0])
        return Issue(
            issue_type=IssueType.VANISHING,
            severity=IssueSeverity.HIGH,
            layer=layer,
            message=f"Every gradient, from that of {layer} on, has been zero on all of the first {self.streak} steps.",
            statistic="norm",
            value=0.0,
            threshold=0.0,
            window=self.streak,
            step=evidence.step,
            recommendation="Look for a factor of zero behind these weights: adapters must not begin at zero twice.",
        )

    def _issue(self, evidence: Evidence, fall: float) -> Issue:
        known = evidence.loss is not None and bool(self.first_losses)
        ratio = math.exp(fall)
        return Issue(
            issue_type=IssueType.VANISHING,
            severity=IssueSeverity.HIGH if known else IssueSeverity.LOW,
            message=(
                f"The gradient norm is {evidence.norm:.3g}, {ratio:.2g} of what it was at first"
                + (", while the loss has not come down with it." if known else ".")
            ),
            statistic="norm_over_first_norms",
            value=ratio,
            threshold=math.exp(_FALL),
            window=self.streak,
            step=evidence.step,
            confidence=0.9 if known else 0.4,
            recommendation=(
                "Look for units that died or saturated; a higher learning rate helps only if they still respond."
                if known
                else "Pass the loss to step(), so that convergence and vanishing gradients can be told apart."
            ),
        )
