"""Stage 3: judges each step of a pair by the rules, keeps the open issues, and detects jumps of norm and loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from gradtrack.analyzers.base import Series
from gradtrack.config import GradientConfig
from gradtrack.gradients.moments import SQUARES, Moments
from gradtrack.health.monitor import GradientMonitor
from gradtrack.health.open_issues import COLLAPSES, OpenIssues, from_plain, order, to_plain, unmuted
from gradtrack.health.rule import CalmSteps, Evidence
from gradtrack.reports import HEALTHY, HealthReport, Issue
from gradtrack.step.data import StepData
from gradtrack.support.state import Stateful


class Judge(Stateful):
    """The open issues of a pair, from its rules and its analyzers, and the series of norms and losses."""

    kept_in_checkpoints = ("_monitor", "series", "_jump", "nonfinite_before")

    def __init__(self, config: GradientConfig, monitor: GradientMonitor) -> None:
        self._config, self._monitor = config, monitor
        self._open_issues = OpenIssues()
        self._of_rules: list[Issue] = []
        self._of_analyzers: list[Issue] = []
        self.nonfinite_before = False
        """Whether the last step had a non-finite element: only the first of such steps in a row makes a record."""
        self.series = Series()
        self._jump = Jump()
        self._most_silent = -1
        """The largest number of groups so far without any gradient at a row; -1 before the first."""
        self.jumped = False
        """Whether the norm or the loss has jumped on this step, or a group fell silent: analyzers run on the next."""
        self.last_log_norm = math.nan
        """ln of the norm of the last step."""
        self.health: HealthReport = HEALTHY

    def judge(self, moments: Moments, data: StepData, *, critical: bool, watched: bool = True) -> None:
        """Judge a step that was measured and protected; it is an event when an issue opens or closes.

        A jump of norm or loss is detected only if analyzers are `watched`, since they run after one; that a group has
        no gradient any more is seen where a row is due.
        """
        finite = moments.finite
        if not finite and not self.nonfinite_before:
            data.event = True
        self.nonfinite_before = not finite
        if not self._config.enable_gradient_monitoring:
            data.health, self.jumped = HEALTHY, False
            return
        evidence = _evidence(moments, data, critical=critical)
        self.last_log_norm = evidence.log_norm
        self.jumped = watched and self._jump.update(evidence.log_norm, data.loss)
        if data.event and finite:
            silent = int(np.count_nonzero(moments.group_rows[:, SQUARES] == 0.0))
            self.jumped |= watched and 0 <= self._most_silent < silent
            self._most_silent = max(self._most_silent, silent)
        self.series.append(evidence.log_norm, data.loss, data.layout.missing, finite=finite)
        data.issues = self._of_rules = self._monitor.judge(evidence)
        if data.drift:
            data.issues = self._of_rules = [*self._of_rules, *unmuted([*data.drift], self._config.mute)]
        self._open_issues.remember(self._of_rules)
        self._update_open(data)

    def _update_open(self, data: StepData) -> None:
        """Update the open issues with those of the rules at a step and the last ones of the analyzers."""
        if self._of_analyzers:
            known = {issue.key for issue in self._of_rules}
            data.issues = [*self._of_rules, *(issue for issue in self._of_analyzers if issue.key not in known)]
        if data.source:
            data.issues = [issue.of(data.source) for issue in data.issues]
        opened, changed = self._open_issues.update(data.issues)
        data.opened = [*data.opened, *opened]
        data.event = data.event or changed
        data.health = self.health = HealthReport.of(list(data.issues))

    @property
    def is_calm(self) -> bool:
        """Whether no issue is open, neither of the rules nor of an analyzer."""
        return self.health is HEALTHY and not (self._of_analyzers or self.nonfinite_before)

    def jumps(self, log_norm: float, loss: float | None) -> bool:
        """Say whether the norm or the loss has jumped on a calm step, and remember it."""
        self.jumped = self._jump.update(log_norm, loss)
        return self.jumped

    def remember(self, steps: CalmSteps, missing: Sequence[str]) -> None:
        """Remember steps on which no issue can open; `jumps` was called for each of them."""
        self.series.extend(steps.log_norms, steps.losses, missing)
        self._monitor.health.remember(steps)
        self.last_log_norm = steps.log_norms[-1]

    def set_analyzer_issues(self, issues: Sequence[Issue]) -> None:
        """Set the issues of the analyzers, which are open from the coming judgement on until they are set again."""
        self._of_analyzers = order(unmuted(list(issues), self._config.mute))
        self._open_issues.remember_of_analyzers(self._of_analyzers)

    def add_analyzer_issues(self, issues: Sequence[Issue], data: StepData) -> None:
        """Set the issues that the analyzers have found on a step that was judged already, and open them on it."""
        before = self._of_analyzers
        self.set_analyzer_issues(issues)
        if self._of_analyzers != before and self._config.enable_gradient_monitoring:
            data.issues = self._of_rules
            self._update_open(data)

    def diagnose(self, issues: Sequence[Issue]) -> list[Issue]:
        """Return the issues of the rules that are open or did harm, with these issues of the analyzers.

        These replace the issues that the analyzers found on an earlier step.
        """
        series = self.series
        harm = (
            one for one in self._open_issues.harm if one.issue_type not in COLLAPSES or series.is_stuck_since(one.step)
        )
        found = [*harm, *self._of_rules, *issues]
        return order(unmuted(found, self._config.mute))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later steps depend on, as plain data."""
        return {
            **super().state_dict(),
            "ledger": self._open_issues.state_dict(),
            "issues": to_plain(self.health.issues),
            "of_rules": to_plain(self._of_rules),
            "of_analyzers": to_plain(self._of_analyzers),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; states of older versions lack some of it."""
        super().load_state_dict(state)
        self._open_issues.load_state_dict(state["ledger"])
        self.health = HealthReport.of(from_plain(state["issues"]))
        self._of_rules = from_plain(state.get("of_rules", ()))
        self._of_analyzers = from_plain(state.get("of_analyzers", ()))


def _evidence(moments: Moments, data: StepData, *, critical: bool) -> Evidence:
    return Evidence(
        step=data.step,
        norm=moments.norm,
        moments=moments,
        layout=data.layout,
        loss=data.loss,
        clipped=bool(data.clipping.get("clipped")),
        left_out=data.leaves_out_spike,
        clip_threshold=data.clipping.get("threshold"),
        nonfinite_action=data.nan_inf["action"],
        critical=critical,
        weights=data.weight_norms,
        version=data.weight_version,
        rate=max(data.learning_rates().values(), default=0.0) if data.weight_norms and not data.skipped else 0.0,
        batch=data.batch,
    )


_RATE: Final = 1 / 16
_FEWEST: Final = 16
_FAR: Final = 6.0
_NORM: Final = math.log(2.0)
_LOSS: Final = 0.25
_LASTING: Final = 2
_PAUSE: Final = 64
_LONGEST: Final = 1024


class Jump(Stateful):
    """Detects a jump: two steps in a row whose norm or loss is far from those before.

    A jump is no issue, it only makes the analyzers run. After each jump it pauses twice as long as before. Far is six
    mean deviations, and a factor of two of the norm or a quarter of the loss.
    """

    kept_in_checkpoints = ("waiting", "pause", "norm", "loss")

    def __init__(self) -> None:
        self.norm, self.loss = _Level(_NORM, relative=False), _Level(_LOSS, relative=True)
        self.waiting, self.pause = 0, _PAUSE

    def update(self, log_norm: float, loss: float | None) -> bool:
        """Update with a step, and say whether the norm or the loss has jumped."""
        jumped = self.norm.update(log_norm)
        if loss is not None:
            jumped = self.loss.update(loss) or jumped
        if self.waiting:
            self.waiting -= 1
            return False
        if jumped:
            self.waiting = self.pause
            self.pause = min(2 * self.pause, _LONGEST)
        return jumped


class _Level(Stateful):
    """A running mean and mean deviation; a value far from them restarts both if the next one is far, too."""

    kept_in_checkpoints = ("count", "streak", "mean", "spread")

    def __init__(self, least: float, *, relative: bool) -> None:
        self._least, self._relative = least, relative
        self.count = self.streak = 0
        self.mean = self.spread = 0.0

    def update(self, value: float) -> bool:
        """Update with a value, and say whether it is the second in a row that is far from those before."""
        if not math.isfinite(value):
            return False
        away = abs(value - self.mean)
        if self.count >= _FEWEST and away > _FAR * self.spread and away > self._limit(value):
            self.streak += 1
            if self.streak >= _LASTING:
                self.count, self.streak = 0, 0
                return True
            return False
        self.streak = 0
        self.count += 1
        if self.count == 1:
            self.mean, self.spread = value, 0.0
            return False
        rate = max(_RATE, 1 / self.count)
        self.spread += rate * (away - self.spread)
        self.mean += rate * (value - self.mean)
        return False

    def _limit(self, value: float) -> float:
        return self._least * max(abs(self.mean), abs(value)) if self._relative else self._least
