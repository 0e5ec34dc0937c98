"""UNSTABLE: a norm that jumps up and down by orders of magnitude from step to step."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final, final

from gradtrack.config import GradientConfig
from gradtrack.health.rule import ANY, TENFOLD, Band, CalmStep, Evidence, Rule
from gradtrack.reports import Issue, IssueSeverity, IssueType

_WINDOW: Final = 20
_CHANGE: Final = TENFOLD
_LARGE: Final = math.log(1e3)
_SHARED: Final = 0.5
_FIRST: Final = 8
_LEARNED: Final = 0.2
_EASED: Final = 2


@final
class UnstableRule(Rule):
    """Opens when half of the last twenty steps changed the norm more than tenfold, or a third more than a thousandfold.

    A tenfold change that the loss hardly shares does not count: where most batches have nothing to teach, as with
    rewards that are rare, the norm goes up and down with nothing being wrong. Nor does one of a loss that is under a
    fifth of what it was at first and has not come up again: what is left of it are the few inputs of a batch that are
    not learned yet, and the norm is theirs. Once open it closes when half as many steps are left that do.
    """

    kept_in_checkpoints = ("last", "last_loss", "jumps", "first_losses", "losses", "opened")

    def __init__(self) -> None:
        self.last = self.last_loss = math.nan
        self.jumps: deque[int] = deque(maxlen=_WINDOW)
        self.first_losses: list[float] = []
        self.losses: deque[float] = deque(maxlen=_WINDOW)
        self.opened = False

    def calm(self, config: GradientConfig) -> Band | None:
        return None if self.opened or self._is_jumping() or math.isnan(self.last) else ANY

    def remember(self, steps: Sequence[CalmStep]) -> None:
        for step in steps:
            self._follow(step.loss)
        self.jumps.extend([0] * len(steps))
        self.last, loss = steps[-1].log_norm, steps[-1].loss
        self.last_loss = math.nan if loss is None else loss

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        log_norm = evidence.log_norm
        if not math.isfinite(log_norm):
            return []
        self._follow(evidence.loss)
        if not math.isnan(self.last):
            self.jumps.append(self._grade(abs(log_norm - self.last), evidence.loss))
        self.last, self.last_loss = log_norm, math.nan if evidence.loss is None else evidence.loss
        self.opened = len(self.jumps) == _WINDOW and any(self.jumps) and self._is_jumping() and not self._has_learned()
        return [_issue(evidence, _WINDOW - self.jumps.count(0))] if self.opened else []

    def _is_jumping(self) -> bool:
        large, all_ = self.jumps.count(2), _WINDOW - self.jumps.count(0)
        eased = _EASED if self.opened else 1
        return eased * all_ * 2 >= _WINDOW or eased * large * 3 >= _WINDOW

    def _follow(self, loss: float | None) -> None:
        if loss is None or not math.isfinite(loss):
            return
        if len(self.first_losses) < _FIRST:
            self.first_losses.append(loss)
        self.losses.append(loss)

    def _has_learned(self) -> bool:
        """Whether the middle of the last losses is under a fifth of the first ones'."""
        if len(self.losses) < _WINDOW:
            return False
        return statistics.median(self.losses) < _LEARNED * statistics.median(self.first_losses)

    def _grade(self, change: float, loss: float | None) -> int:
        """Return 2 for a thousandfold change, 1 for a tenfold one that the loss shares or may share, else 0."""
        if change <= _CHANGE or change > _LARGE:
            return 2 if change > _LARGE else 0
        if loss is None or not math.isfinite(loss - self.last_loss):
            return 1
        return int(abs(loss - self.last_loss) > _SHARED * max(abs(loss), abs(self.last_loss)))


def _issue(evidence: Evidence, count: int) -> Issue:
    return Issue(
        issue_type=IssueType.UNSTABLE,
        severity=IssueSeverity.MEDIUM,
        message=f"The gradient norm changed more than tenfold on {count} of the last {_WINDOW} steps.",
        statistic="tenfold_change_share",
        value=count / _WINDOW,
        threshold=0.5,
        window=_WINDOW,
        step=evidence.step,
        recommendation="Reduce the learning rate, use larger batches, or look for batches that differ in kind.",
    )
