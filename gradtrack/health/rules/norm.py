"""Rules about the norm over the steps: a spike, jumps up and down, a norm that vanishes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final, final

import numpy as np

from gradtrack.config import GradientConfig
from gradtrack.gradients.moments import SQUARES
from gradtrack.health.rule import (
    ANY,
    MOST_TOGETHER,
    SLACK,
    TENFOLD,
    Band,
    CalmSteps,
    Evidence,
    RollingMedian,
    Rule,
)
from gradtrack.reports import Issue, IssueSeverity, IssueType, usual_confidence
from gradtrack.support.names import module_of


def holder(evidence: Evidence) -> tuple[str, str]:
    """Return the layer that holds most of the norm of a step, empty where none does, and a sentence about it."""
    layout, squares = evidence.layout, evidence.moments.rows[:, SQUARES]
    total = float(squares.sum())
    if len(layout.names) != len(squares) or not 0 < total < math.inf:
        return "", ""
    groups = np.bincount(layout.group_of, weights=squares)
    group, most = layout.group_names[int(groups.argmax())], float(groups.max()) / total
    name, alone = layout.names[int(squares.argmax())], float(squares.max()) / total
    layer = module_of(name) if alone >= _MOST else group if most >= _MOST else ""
    return layer, f" {most:.0%} of its square is in group {group}, {alone:.0%} in {name} alone."


def beyond_limit(rule: Rule, evidence: Evidence, limit: float | None) -> list[Issue]:
    """Return the issue of a norm above `exploding_threshold`, or below `vanishing_threshold`."""
    large = rule.kind is IssueType.EXPLODING
    if limit is None or not (evidence.norm > limit if large else evidence.norm < limit):
        return []
    side, name = ("above", "exploding_threshold") if large else ("below", "vanishing_threshold")
    held = holder(evidence)[1] if large else ""
    remedy = "Reduce the learning rate or clip" if large else "Look for saturated units or raise the learning rate"
    return rule.open(
        evidence,
        ("norm", evidence.norm, limit),
        f"The gradient norm {evidence.norm:.3g} is {side} {name}={limit:g}.{held}",
        f"{remedy}; a limit in absolute terms moves with the loss scale.",
    )


_MOST: Final = 0.5
_SPIKE_WINDOW: Final = 50
_WARMUP: Final = 8
_DEVIATIONS: Final = 6.0
_JUMP: Final = TENFOLD
_HARMFUL: Final = math.log(30.0)
_BEYOND: Final = math.log(3.0)
_TWICE: Final = math.log(2.0)
_BUILT_UP: Final = 0.4
_SPIKE_FIRST: Final = 8
_SPIKE_LEARNED: Final = 0.5
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
    less than thirtyfold, which is over when it is over. The issue is at the layer that holds most of the norm on the
    first of such steps.
    """

    kind = IssueType.EXPLODING
    kept_in_checkpoints = ("window", "streak", "last", "grown", "layer", "largest", "first_norms", "first_losses")

    def __init__(self) -> None:
        self.window = RollingMedian(_SPIKE_WINDOW)
        self.streak = 0
        self.last = math.nan
        self.grown = False
        self.layer = ""
        self.largest = -math.inf
        self.first_norms: list[float] = []
        self.first_losses: list[float] = []

    def calm(self, config: GradientConfig) -> Band | None:
        # However low the steps to come are, at most all of them join what is below this one, and it is still below
        # the median.
        surely_below_median = (len(self.window) - 2 * (MOST_TOGETHER + 1)) // 2
        if self.streak or surely_below_median < 0 or len(self.first_norms) < _SPIKE_FIRST:
            return None
        limit = math.inf if config.exploding_threshold is None else math.log(config.exploding_threshold)
        return (-math.inf, min(self.window[surely_below_median] + _JUMP, limit) - SLACK)

    def remember(self, steps: CalmSteps) -> None:
        self.window.extend(steps.log_norms)
        self.last = steps.log_norms[-1]
        self.largest = max(self.largest, *steps.log_norms)

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        found = beyond_limit(self, evidence, config.exploding_threshold)
        log_norm = evidence.log_norm
        if not math.isfinite(log_norm):
            return found
        if len(self.first_norms) < _SPIKE_FIRST:
            self.first_norms.append(log_norm)
            self.first_losses += [] if evidence.loss is None else [evidence.loss]
        height = log_norm - self.window.median if len(self.window) >= _WARMUP else 0.0
        spike = height >= _JUMP and self._is_new(height) and not self._is_left_over(evidence)
        if spike and not self.streak:
            before = self.last - self.window.median
            self.grown = before > max(_TWICE, _BUILT_UP * height)
            self.layer = holder(evidence)[0]
        self.last = log_norm
        self.streak = self.streak + 1 if spike else 0
        if spike and self.streak <= _SPIKE_WINDOW:
            return found or self._relative(evidence, height)
        if self.streak > _SPIKE_WINDOW:
            self.window = RollingMedian(_SPIKE_WINDOW)
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
        return 0 < evidence.loss < _SPIKE_LEARNED * statistics.median(self.first_losses)

    def _relative(self, evidence: Evidence, height: float) -> list[Issue]:
        median, jump = math.exp(self.window.median), math.exp(min(height, _LARGEST))
        done = " Clipping bounded this update." if evidence.clipped else ""
        done = " The step was left out as a spike." if evidence.left_out else done
        return self.open(
            evidence,
            ("norm_over_median", jump, math.exp(min(max(_JUMP, _DEVIATIONS * self.window.deviation), _LARGEST))),
            (
                f"The gradient norm {'has grown' if self.grown else 'jumped'} to {evidence.norm:.3g}, {jump:.3g} times "
                f"the median {median:.3g} of the last {len(self.window)} steps.{holder(evidence)[1]}"
            ),
            f"Look at this batch; if it keeps happening, reduce the learning rate or clip.{done}",
            severity=IssueSeverity.MEDIUM if self.grown or height < _HARMFUL else IssueSeverity.HIGH,
            layer=self.layer,
            window=len(self.window),
        )


_UNSTABLE_WINDOW: Final = 20
_CHANGE: Final = TENFOLD
_LARGE: Final = math.log(1e3)
_SHARED: Final = 0.5
_UNSTABLE_FIRST: Final = 8
_UNSTABLE_LEARNED: Final = 0.2
_EASED: Final = 2


@final
class UnstableRule(Rule):
    """Opens when half of the last twenty steps changed the norm more than tenfold, or a third more than a thousandfold.

    A tenfold change that the loss hardly shares does not count: where most batches have nothing to teach, as with
    rewards that are rare, the norm goes up and down with nothing being wrong. Nor does one of a loss that is under a
    fifth of what it was at first and has not come up again: what is left of it are the few inputs of a batch that are
    not learned yet, and the norm is theirs. Once open it closes when half as many steps are left that do.
    """

    kind = IssueType.UNSTABLE
    kept_in_checkpoints = ("last", "last_loss", "jumps", "first_losses", "losses", "opened")

    def __init__(self) -> None:
        self.last = self.last_loss = math.nan
        self.jumps: deque[int] = deque(maxlen=_UNSTABLE_WINDOW)
        self.first_losses: list[float] = []
        self.losses: deque[float] = deque(maxlen=_UNSTABLE_WINDOW)
        self.opened = False

    def calm(self, config: GradientConfig) -> Band | None:
        return None if self.opened or self._is_jumping() or math.isnan(self.last) else ANY

    def remember(self, steps: CalmSteps) -> None:
        for loss in steps.losses:
            self._follow(loss)
        self.jumps.extend([0] * len(steps.losses))
        self.last, loss = steps.log_norms[-1], steps.losses[-1]
        self.last_loss = math.nan if loss is None else loss

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        log_norm = evidence.log_norm
        if not math.isfinite(log_norm):
            return []
        self._follow(evidence.loss)
        if not math.isnan(self.last):
            self.jumps.append(self._grade(abs(log_norm - self.last), evidence.loss))
        self.last, self.last_loss = log_norm, math.nan if evidence.loss is None else evidence.loss
        self.opened = (
            len(self.jumps) == _UNSTABLE_WINDOW and any(self.jumps) and self._is_jumping() and not self._has_learned()
        )
        if not self.opened:
            return []
        count = _UNSTABLE_WINDOW - self.jumps.count(0)
        return self.open(
            evidence,
            ("tenfold_change_share", count / _UNSTABLE_WINDOW, 0.5),
            f"The gradient norm changed more than tenfold on {count} of the last {_UNSTABLE_WINDOW} steps.",
            "Reduce the learning rate, use larger batches, or look for batches that differ in kind.",
            severity=IssueSeverity.MEDIUM,
            window=_UNSTABLE_WINDOW,
        )

    def _is_jumping(self) -> bool:
        large, all_ = self.jumps.count(2), _UNSTABLE_WINDOW - self.jumps.count(0)
        eased = _EASED if self.opened else 1
        return eased * all_ * 2 >= _UNSTABLE_WINDOW or eased * large * 3 >= _UNSTABLE_WINDOW

    def _follow(self, loss: float | None) -> None:
        if loss is None or not math.isfinite(loss):
            return
        if len(self.first_losses) < _UNSTABLE_FIRST:
            self.first_losses.append(loss)
        self.losses.append(loss)

    def _has_learned(self) -> bool:
        """Whether the middle of the last losses is under a fifth of the first ones'."""
        if len(self.losses) < _UNSTABLE_WINDOW:
            return False
        return statistics.median(self.losses) < _UNSTABLE_LEARNED * statistics.median(self.first_losses)

    def _grade(self, change: float, loss: float | None) -> int:
        """Return 2 for a thousandfold change, 1 for a tenfold one that the loss shares or may share, else 0."""
        if change <= _CHANGE or change > _LARGE:
            return 2 if change > _LARGE else 0
        if loss is None or not math.isfinite(loss - self.last_loss):
            return 1
        return int(abs(loss - self.last_loss) > _SHARED * max(abs(loss), abs(self.last_loss)))


_REFERENCE_STEPS: Final = 10
_FALL: Final = math.log(1e-4)
_PATIENCE: Final = 5
_VANISHING_LEARNED: Final = 0.5


@final
class VanishingRule(Rule):
    """Opens when the norm stays below 1e-4 of what it was at first, though the loss is still above half of its start.

    A norm that falls because the loss falls is convergence. Without a loss the two cannot be told apart, so the issue
    is then LOW.
    """

    kind = IssueType.VANISHING
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

    def remember(self, steps: CalmSteps) -> None:
        self.streak = 0

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        found = beyond_limit(self, evidence, config.vanishing_threshold)
        log_norm = evidence.log_norm
        if math.isnan(log_norm) or not evidence.layout.names:
            return found
        if len(self.first_norms) < _REFERENCE_STEPS and log_norm > -math.inf:
            self._learn(evidence, log_norm)
            return found
        if not self.first_norms:
            self.streak += 1
            return found or (self._never(evidence) if self.streak >= _PATIENCE else [])
        fall = log_norm - max(self.first_norms)
        small = fall < _FALL and not self._has_learned(evidence.loss)
        self.streak = self.streak + 1 if small else 0
        return found or (self._issue(evidence, fall) if self.streak >= _PATIENCE else [])

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
        return loss < _VANISHING_LEARNED * start if start > 0 else loss < start

    def _never(self, evidence: Evidence) -> list[Issue]:
        """Report gradients that were zero from the first step on, at the first weight that should have had one."""
        layer = module_of(evidence.layout.names[0])
        return self.open(
            evidence,
            ("norm", 0.0, 0.0),
            f"Every gradient, from that of {layer} on, has been zero on all of the first {self.streak} steps.",
            "Look for a factor of zero behind these weights: adapters must not begin at zero twice.",
            layer=layer,
            window=self.streak,
        )

    def _issue(self, evidence: Evidence, fall: float) -> list[Issue]:
        known = evidence.loss is not None and bool(self.first_losses)
        ratio = math.exp(fall)
        return self.open(
            evidence,
            ("norm_over_first_norms", ratio, math.exp(_FALL)),
            (
                f"The gradient norm is {evidence.norm:.3g}, {ratio:.2g} of what it was at first"
                + (", while the loss has not come down with it." if known else ".")
            ),
            (
                "Look for units that died or saturated; a higher learning rate helps only if they still respond."
                if known
                else "Pass the loss to step(), so that convergence and vanishing gradients can be told apart."
            ),
            severity=IssueSeverity.HIGH if known else IssueSeverity.LOW,
            window=self.streak,
            confidence=usual_confidence(self.kind) if known else 0.4,
        )
