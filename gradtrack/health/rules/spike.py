"""EXPLODING: a norm that jumps far above its recent past, or above an absolute limit that the user gave."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, final

from gradtrack.config import GradientConfig
from gradtrack.health.rule import MOST_TOGETHER, SLACK, TENFOLD, Band, CalmStep, Evidence, Rule, beyond_limit
from gradtrack.reports import Issue, IssueSeverity, IssueType
from gradtrack.support.statistics import RollingMedian

_WINDOW: Final = 50
_WARMUP: Final = 8
_DEVIATIONS: Final = 6.0
_JUMP: Final = TENFOLD
_HARMFUL: Final = math.log(30.0)
_BEYOND: Final = math.log(3.0)
_TWICE: Final = math.log(2.0)
_BUILT_UP: Final = 0.4
_FIRST: Final = 8
_LEARNED: Final = 0.5
_LARGEST: Final = 700.0
"""Where exp() ends."""


@final
class SpikeRule(Rule):
    """Opens when ln of the norm is six robust deviations and a factor of ten above the window's median.

    It must be beyond the largest so far as well: a jump that repeats is the level of this run, and a norm that the
    training has had at its beginning does no harm to it. A spike does not enter the window, so that a run of them
    is one issue; a new level that lasts for a whole window is accepted as the new normal. Where the loss is still
    under half of what it was on the first steps, and the norm not ten times what it was, there is none: once nearly
    all is learned, the norm is that of the few inputs that are not. What has grown over several steps is the
    training's own doing, of which it may recover, and weighs less than the jump of a single batch; so does one of
    less than thirtyfold, which is over when it is over.
    """

    kept_in_checkpoints = ("window", "streak", "last", "grown", "largest", "first_norms", "first_losses")

    def __init__(self) -> None:
        self.window = RollingMedian(_WINDOW)
        self.streak = 0
        self.last = math.nan
        self.grown = False
        self.largest = -math.inf
        self.first_norms: list[float] = []
        self.first_losses: list[float] = []

    def calm(self, config: GradientConfig) -> Band | None:
        # However low the steps to come are, at most all of them join what is below this one, and it is still below
        # the median.
        surely_below_median = (len(self.window) - 2 * (MOST_TOGETHER + 1)) // 2
        if self.streak or surely_below_median < 0 or len(self.first_norms) < _FIRST:
            return None
        limit = math.inf if config.exploding_threshold is None else math.log(config.exploding_threshold)
        return (-math.inf, min(self.window[surely_below_median] + _JUMP, limit) - SLACK)

    def remember(self, steps: Sequence[CalmStep]) -> None:
        for step in steps:
            self.window.push(step.log_norm)
        self.last = steps[-1].log_norm
        self.largest = max(self.largest, *(step.log_norm for step in steps))

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        found = beyond_limit(evidence, IssueType.EXPLODING, config.exploding_threshold)
        log_norm = evidence.log_norm
        if not math.isfinite(log_norm):
            return found
        if len(self.first_norms) < _FIRST:
            self.first_norms.append(log_norm)
            self.first_losses += [] if evidence.loss is None else [evidence.loss]
        height = log_norm - self.window.median if len(self.window) >= _WARMUP else 0.0
        spike = height >= _JUMP and self._is_new(height) and not self._is_left_over(evidence)
        if spike and not self.streak:
            before = self.last - self.window.median
            self.grown = before > max(_TWICE, _BUILT_UP * height)
        self.last = log_norm
        self.streak = self.streak + 1 if spike else 0
        if spike and self.streak <= _WINDOW:
            return found or [self._relative(evidence, height)]
        if self.streak > _WINDOW:
            self.window = RollingMedian(_WINDOW)
            self.streak = 0
        self.window.push(log_norm)
        self.largest = max(self.largest, log_norm)
        return found

    def _is_new(self, height: float) -> bool:
        largest = self.largest - self.window.median
        return height > max(_DEVIATIONS * self.window.deviation, largest + _BEYOND)

    def _is_left_over(self, evidence: Evidence) -> bool:
        """Whether the loss is under half of what it was on the first steps, and the norm not far above what it was."""
        if evidence.loss is None or not self.first_losses or evidence.log_norm > max(self.first_norms) + _JUMP:
            return False
        return 0 < evidence.loss < _LEARNED * statistics.median(self.first_losses)

    def _relative(self, evidence: Evidence, height: float) -> Issue:
        median, jump = math.exp(self.window.median), math.exp(min(height, _LARGEST))
        clipped = " Clipping bounded this update." if evidence.clipped else ""
        return Issue(
            issue_type=IssueType.EXPLODING,
            severity=IssueSeverity.MEDIUM if self.grown or height < _HARMFUL else IssueSeverity.HIGH,
            message=(
                f"The gradient norm {'has grown' if self.grown else 'jumped'} to {evidence.norm:.3g}, {jump:.3g} times "
                f"the median {median:.3g} of the last {len(self.window)} steps."
            ),
            statistic="norm_over_median",
            value=jump,
            threshold=math.exp(min(max(_JUMP, _DEVIATIONS * self.window.deviation), _LARGEST)),
            window=len(self.window),
            step=evidence.step,
            recommendation=f"Look at this batch; if it keeps happening, reduce the learning rate or clip.{clipped}",
        )
