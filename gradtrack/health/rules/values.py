"""Rules about the values of a step: no gradients, NaN and Inf, more than clipping lets through, a jump of the loss."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import ClassVar, Final, final

from gradtrack.config import GradientConfig
from gradtrack.health.open_issues import NONFINITE_BATCH
from gradtrack.health.rule import ANY, LEAST_LEFT, MOST_TOGETHER, Band, CalmSteps, Evidence, Rule, has_chosen_limit
from gradtrack.protection.nonfinite import first_nonfinite, nonfinite_parts
from gradtrack.reports import Issue, IssueSeverity, IssueType
from gradtrack.support.interrupts import pass_on

_PATIENCE: Final = 3
"""A loop may step once without a gradient, after a batch that was empty or left out."""


class _StreakRule(Rule):
    """A rule that counts the faulty steps in a row, which one calm step ends."""

    kept_in_checkpoints: ClassVar[tuple[str, ...]] = ("streak",)

    def __init__(self) -> None:
        self.streak = 0

    def calm(self, config: GradientConfig) -> Band | None:
        return ANY

    def remember(self, steps: CalmSteps) -> None:
        self.streak = 0


@final
class NoGradientsRule(_StreakRule):
    """Opens when no parameter has a gradient on three steps in a row, and closes with the first gradient."""

    kind = IssueType.DISCONNECTED

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        self.streak = 0 if evidence.layout.names else self.streak + 1
        if self.streak < _PATIENCE:
            return []
        return self.open(
            evidence,
            ("steps_without_any_gradient", self.streak, _PATIENCE),
            f"No parameter had a gradient on the last {self.streak} steps, so that nothing was trained.",
            (
                "Look for a backward pass that is missing or over another model, "
                "or for a zero_grad() between it and the step."
            ),
            window=self.streak,
        )


SCALER_PATIENCE: Final = 5
"""A GradScaler overflows now and then to find its scale; only this many in a row are a fault."""


@final
class NumericalRule(_StreakRule):
    """Opens when an element is NaN or infinite and closes with the first finite step.

    When it opens it looks for such values in the batch of the step, where the loop has passed one.
    """

    kind = IssueType.NUMERICAL
    kept_in_checkpoints = ("streak", "in_batch")

    def __init__(self) -> None:
        super().__init__()
        self.in_batch: str | None = None
        """What was found in the batch with which the issue opened."""

    def remember(self, steps: CalmSteps) -> None:
        self.streak, self.in_batch = 0, None

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        bad_loss = evidence.loss is not None and not math.isfinite(evidence.loss)
        if evidence.moments.finite and not bad_loss:
            self.streak, self.in_batch = 0, None
            return []
        self.streak += 1
        if not config.enable_nan_inf_check:
            return []
        if evidence.nonfinite_action == "scaler" and self.streak < SCALER_PATIENCE:
            return []
        if self.in_batch is None:
            self.in_batch = _look_at(evidence.batch, evidence.step)
        return self._bad_loss(evidence) if evidence.moments.finite else self._issue(evidence)

    def _bad_loss(self, evidence: Evidence) -> list[Issue]:
        return self.open(
            evidence,
            (NONFINITE_BATCH if self.in_batch else "nonfinite_loss", 1.0, 0.0),
            f"The loss is {evidence.loss}, though every gradient is finite.{self.in_batch}",
            _DATA
            if self.in_batch
            else "Look for a masked row, a log(0) or an overflow whose gradient a mask or clamp cuts off.",
            window=self.streak,
        )

    def _issue(self, evidence: Evidence) -> list[Issue]:
        moments, names = evidence.moments, evidence.layout.names
        affected = moments.nonfinite_rows()
        nearest = affected[-1]  # to the loss, where the modules stand in their order
        count, total = moments.nonfinite_count, evidence.layout.total_count
        return self.open(
            evidence,
            (NONFINITE_BATCH, 1.0, 0.0) if self.in_batch else ("nonfinite_count", count, 0.0),
            (
                f"{count} of {total} gradient elements are NaN or infinite, in {len(affected)} of {len(names)} "
                f"parameters, the last of them {names[nearest]}.{self.in_batch}"
            ),
            f"{_DONE.get(evidence.nonfinite_action, _DONE['report'])}{self._advice(evidence)}",
            severity=IssueSeverity.CRITICAL if evidence.critical else IssueSeverity.HIGH,
            layer=names[nearest] if len(affected) < len(names) else "",
            window=self.streak,
        )

    def _advice(self, evidence: Evidence) -> str:
        if self.in_batch:
            return f" {_DATA}"
        if evidence.nonfinite_action == "scaler":
            return ""
        return _LOOK if evidence.batch is not None else f"{_LOOK} {_PASS}"


def _look_at(batch: object, step: int) -> str:
    """Say where a batch holds values that are not finite; nothing where it holds none, or cannot be read."""
    try:
        found = first_nonfinite(nonfinite_parts(batch, "batch{}"))
    except Exception as fault:  # of the user's own container
        pass_on(fault)
        return ""
    return f" At step {step} {found}." if found else ""


_DATA: Final = "Look at the data of this batch."
_LOOK: Final = (
    " Look for NaN in the data of this batch, for log(0), a division by zero or an overflow in its loss, "
    "then at the learning rate."
)
_PASS: Final = "Pass batch= to have its tensors looked at."
_DONE: Final = {
    "skip": "The optimizer step was left out.",
    "replace": "The values were replaced, and after clipping they may own the whole update: prefer skip.",
    "scaler": "The loss scale has backed off several times in a row: look at the loss itself, not at the scale.",
    "report": "The gradients were left as they are, so the weights will become NaN.",
}


_WINDOW: Final = 20
_SHARE: Final = 0.95
_EXCESS: Final = -math.log(LEAST_LEFT)
_NOT_CLIPPED: Final = -1.0


@final
class ClipSaturatedRule(Rule):
    """Opens when more than 95 % of steps are clipped and the median norm is a hundred times the limit.

    Silent on the default limit: only a limit that the user has set says what norm is to be expected.
    """

    kind = IssueType.CLIP_SATURATED
    kept_in_checkpoints = ("excess",)

    def __init__(self) -> None:
        self.excess: deque[float] = deque(maxlen=_WINDOW)

    def calm(self, config: GradientConfig) -> Band | None:
        return ANY if max(self.excess, default=0.0) < _EXCESS else None

    def remember(self, steps: CalmSteps) -> None:
        for log_norm, limit, clipped in zip(steps.log_norms, steps.limits, steps.clipped, strict=True):
            if limit is not None:
                self.excess.append(log_norm - math.log(limit) if clipped else _NOT_CLIPPED)

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        log_norm, limit = evidence.log_norm, evidence.clip_threshold
        if limit is None or not math.isfinite(log_norm) or not has_chosen_limit(config):
            return []
        self.excess.append(log_norm - math.log(limit) if evidence.clipped else _NOT_CLIPPED)
        if len(self.excess) < _WINDOW or max(self.excess) < _EXCESS:
            return []
        median = statistics.median(self.excess)
        if median < _EXCESS:
            return []
        share = sum(excess > 0 for excess in self.excess) / _WINDOW
        if share <= _SHARE:
            return []
        return self.open(
            evidence,
            ("median_norm_over_limit", math.exp(median), math.exp(_EXCESS)),
            (
                f"{share:.0%} of the last {_WINDOW} steps were clipped, at a median norm of "
                f"{math.exp(median):.3g} times the limit {limit:g}: the norm no longer matters."
            ),
            f"Set max_grad_norm near {math.exp(median) * limit:.2g}, or scale the loss down.",
            severity=IssueSeverity.LOW,
            window=_WINDOW,
        )


_LOSS_WINDOW: Final = 50
_LOSS_KNOWN: Final = 8
_LOSS_JUMP: Final = 10.0
_FURTHER: Final = 3.0
_STAYS: Final = MOST_TOGETHER + 4
"""So many steps open the issue; more than those that are remembered together, none of which can open it then."""


@final
class LossJumpRule(Rule):
    """Opens when the loss has jumped to ten times its recent median and three times all it ever was, and stays there.

    It closes with the first loss below that. Losses of both signs are no size of anything, and open nothing.
    """

    kind = IssueType.LOSS_JUMP
    kept_in_checkpoints = ("losses", "largest", "streak", "since")

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=_LOSS_WINDOW)
        self.largest = 0.0
        self.streak = self.since = 0

    def calm(self, config: GradientConfig) -> Band | None:
        return None if self.streak else ANY

    def remember(self, steps: CalmSteps) -> None:
        losses = [loss for loss in steps.losses if loss is not None]
        largest = max(losses, default=0.0)
        if self.streak or largest > _FURTHER * self.largest:
            for loss in losses:
                self._follow(loss)
        else:
            self.losses.extend(losses)
            self.largest = max(self.largest, largest)

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        loss = evidence.loss
        if loss is None or not math.isfinite(loss):
            return []
        self._follow(loss)
        if self.streak < _STAYS:
            return []
        if self.streak == _STAYS:
            self.since = evidence.step - _STAYS + 1
        median = statistics.median(self.losses)
        return self.open(
            evidence,
            ("loss_over_median", loss / median, self._limit() / median),
            (
                f"The loss jumped from {median:.3g} at step {self.since} and has stayed above {self._limit():.3g}: "
                f"it is {loss:.3g} now."
            ),
            "Go back to a checkpoint from before that step, and look at its batch and learning rate.",
            window=self.streak,
        )

    def _limit(self) -> float:
        return max(_LOSS_JUMP * statistics.median(self.losses), _FURTHER * self.largest)

    def _follow(self, loss: float) -> None:
        far = loss > _FURTHER * self.largest and len(self.losses) >= _LOSS_KNOWN and min(self.losses) > 0
        if far and loss > self._limit():
            self.streak += 1
            return
        self.streak = 0
        self.losses.append(loss)
        self.largest = max(self.largest, loss)


_LOOKS: Final = 2
_RESOLVED: Final = 1e-6


@final
class UnchangedRule(Rule):
    """Opens when the weights are exactly those of two rows before, though each row had a gradient and a positive rate.

    Where the optimizer has written them, the update must be larger than what float32 rounds away. It closes with the
    first row on which they have changed.
    """

    kind = IssueType.UNCHANGED
    kept_in_checkpoints = ("weights", "version", "looks", "since")

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        self.looks = self.since = self.version = 0

    def calm(self, config: GradientConfig) -> Band | None:
        return ANY if self.looks < _LOOKS else None

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        if evidence.weights:
            update = evidence.rate * evidence.norm if evidence.moments.finite else 0.0
            if self.weights == evidence.weights and (
                self.version == evidence.version or update > _RESOLVED * math.hypot(*evidence.weights.values())
            ):
                self.looks += 1
            else:
                self.looks, self.since = 0, evidence.step
            self.weights, self.version = dict(evidence.weights) if update > 0 else {}, evidence.version
        if self.looks < _LOOKS:
            return []
        return self.open(
            evidence,
            ("steps_without_any_update", evidence.step - self.since, 0.0),
            (
                f"The weights are exactly those of step {self.since}: no update since then has changed any, "
                "though there were gradients and a positive learning rate."
            ),
            (
                "Call optimizer.step() after each backward pass, and no zero_grad() between the two; "
                "pass accumulate=True for micro-batches without a step of their own."
            ),
            window=evidence.step - self.since,
        )
