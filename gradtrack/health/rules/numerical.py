"""NUMERICAL: non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, final

from gradtrack.config import GradientConfig
from gradtrack.health.rule import ANY, Band, CalmStep, Evidence, Rule
from gradtrack.reports import Issue, IssueSeverity, IssueType

_SCALER_PATIENCE: Final = 5
"""A GradScaler overflows now and then to find its scale; only this many in a row are a fault."""


@final
class NumericalRule(Rule):
    """Opens when an element is NaN or infinite and closes with the first finite step."""

    kept_in_checkpoints = ("streak",)

    def __init__(self) -> None:
        self.streak = 0

    def calm(self, config: GradientConfig) -> Band | None:
        return ANY

    def remember(self, steps: Sequence[CalmStep]) -> None:
        self.streak = 0

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        bad_loss = evidence.loss is not None and not math.isfinite(evidence.loss)
        if evidence.moments.finite and not bad_loss:
            self.streak = 0
            return []
        self.streak += 1
        if not config.enable_nan_inf_check:
            return []
        if evidence.nonfinite_action == "scaler" and self.streak < _SCALER_PATIENCE:
            return []
        return [self._issue(evidence) if not evidence.moments.finite else self._bad_loss(evidence)]

    def _bad_loss(self, evidence: Evidence) -> Issue:
        return Issue(
            issue_type=IssueType.NUMERICAL,
            severity=IssueSeverity.HIGH,
            message=f"The loss is {evidence.loss}, though every gradient is finite.",
            statistic="nonfinite_loss",
            value=1.0,
            threshold=0.0,
            window=self.streak,
            step=evidence.step,
            recommendation="Look for a masked row, a log(0) or an overflow whose gradient a mask or clamp cuts off.",
        )

    def _issue(self, evidence: Evidence) -> Issue:
        moments, names = evidence.moments, evidence.layout.names
        affected = moments.nonfinite_rows()
        nearest = affected[-1]  # to the loss, where the modules stand in their order
        count, total = moments.nonfinite_count, evidence.layout.total_count
        return Issue(
            issue_type=IssueType.NUMERICAL,
            severity=IssueSeverity.CRITICAL if evidence.critical else IssueSeverity.HIGH,
            layer=names[nearest] if len(affected) < len(names) else "",
            message=(
                f"{count} of {total} gradient elements are NaN or infinite, in {len(affected)} of {len(names)} "
                f"parameters, the last of them {names[nearest]}."
            ),
            statistic="nonfinite_count",
            value=float(count),
            threshold=0.0,
            window=self.streak,
            step=evidence.step,
            recommendation=_ADVICE.get(evidence.nonfinite_action, _ADVICE["report"]),
        )


_LOOK: Final = (
    "Look for log(0), a division by zero or an overflow in the loss of this batch, then at the learning rate."
)
_ADVICE: Final = {
    "skip": f"The optimizer step was left out. {_LOOK}",
    "replace": f"The values were replaced, and after clipping they may own the whole update: prefer skip. {_LOOK}",
    "scaler": "The loss scale has backed off several times in a row: look at the loss itself, not at the scale.",
    "report": f"The gradients were left as they are, so the weights will become NaN. {_LOOK}",
}
