"""The rules together: what is open now, root causes before their consequences."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, TypeVar

from gradtrack.config import GradientConfig
from gradtrack.health.open_issues import unmuted
from gradtrack.health.rule import LEAST_LEFT, MOST_WAITING, SLACK, TENFOLD, Band, CalmStep, Evidence, Rule
from gradtrack.health.rules.clip_saturated import ClipSaturatedRule
from gradtrack.health.rules.no_gradients import NoGradientsRule
from gradtrack.health.rules.numerical import NumericalRule
from gradtrack.health.rules.spike import SpikeRule
from gradtrack.health.rules.unstable import UnstableRule
from gradtrack.health.rules.vanishing import VanishingRule
from gradtrack.reports import Issue
from gradtrack.support.interrupts import pass_on

NEVER: Final[Band] = (math.inf, -math.inf)
_STEP: Final = TENFOLD - SLACK
_severity = attrgetter("severity")
_FEW: Final = 3
Limits = tuple[float | None, float | None]
Answer = TypeVar("Answer")
_logger = logging.getLogger("gradtrack")


RULES: Final[Mapping[str, type[Rule]]] = {
    "clip_saturated": ClipSaturatedRule,
    "no_gradients": NoGradientsRule,
    "numerical": NumericalRule,
    "spike": SpikeRule,
    "unstable": UnstableRule,
    "vanishing": VanishingRule,
}
"""The rules by the names under which checkpoints keep what they remember."""


class Health:
    """The rules of one (model, optimizer) pair, each with its own window.

    Where none of them can open at the step to come, it may wait for being judged, until there are several or somebody
    asks: between `low` and `high`, which are bounds of ln of its norm. Those of the steps after it are within `band`.
    """

    def __init__(self) -> None:
        self._rules = {name: rule() for name, rule in RULES.items()}
        self._waiting: list[CalmStep] = []
        self._watchful = 0
        self.band, (self.low, self.high) = NEVER, NEVER
        self._limits: Limits = (None, None)
        """The absolute limits of the norm that the bounds keep to."""

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        """Take in the evidence of one step and return the issues that are open, the most severe first."""
        if self.low < self.high:
            self._watchful = MOST_WAITING if len(self._waiting) < _FEW else 0
        self.catch_up()
        found = self._judge(evidence, config)
        self._foresee(evidence.log_norm, config, open_issues=bool(found))
        return sorted(unmuted(found, config.mute), key=_severity, reverse=True) if found else found

    def may_wait(
        self, log_norm: float, loss: float | None, clipping: Mapping[str, Any], config: GradientConfig
    ) -> bool:
        """Say whether no rule can open at a step with gradients."""
        return (
            self.low < log_norm < self.high
            and clipping.get("coefficient", 1.0) > LEAST_LEFT
            and (loss is None or math.isfinite(loss))
            and self._limits == (config.vanishing_threshold, config.exploding_threshold)
        )

    def postpone(self, steps: Sequence[CalmStep], config: GradientConfig) -> None:
        """Let steps wait that may, of which there is room for all."""
        self._waiting += steps
        log_norm = steps[-1].log_norm
        if len(self._waiting) >= MOST_WAITING:
            self.catch_up()
            self._foresee(log_norm, config)
        else:
            low, high = self.band
            self.low = low if low > log_norm - _STEP else log_norm - _STEP
            self.high = high if high < log_norm + _STEP else log_norm + _STEP

    @property
    def room(self) -> int:
        """Return how many more steps may wait before they are judged; none where the next one may not."""
        return MOST_WAITING - len(self._waiting) if self.low < self.high else 0

    def catch_up(self) -> None:
        """Let the rules take in the steps that wait, after which their bounds hold no longer."""
        self.band, (self.low, self.high) = NEVER, NEVER
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._ask(lambda rule: rule.take_in(waiting))

    def _judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        return [issue for issues in self._ask(lambda rule: rule.judge(evidence, config)) for issue in issues]

    def _ask(self, question: Callable[[Rule], Answer]) -> list[Answer]:
        """Return what every rule says; one that fails must not stop the training, and is left out from now on."""
        answers: list[Answer] = []
        for name, rule in list(self._rules.items()):
            try:
                answers.append(question(rule))
            except Exception as fault:
                pass_on(fault)
                _logger.warning("rule %s failed and is left out from now on", name, exc_info=True)
                del self._rules[name]
        return answers

    def _foresee(self, log_norm: float, config: GradientConfig, *, open_issues: bool = False) -> None:
        """Find between which norms no rule opens; for a while not, where hardly a step has stayed there."""
        if self._watchful:
            self._watchful -= 1
        elif not open_issues and math.isfinite(log_norm):
            bands = self._ask(lambda rule: rule.calm(config))
            found = [band for band in bands if band is not None]
            if len(found) == len(bands):
                low, high = self.band = max(low for low, _ in found), min(high for _, high in found)
                self.low, self.high = max(low, log_norm - _STEP), min(high, log_norm + _STEP)
                self._limits = config.vanishing_threshold, config.exploding_threshold

    def state_dict(self) -> dict[str, Any]:
        """Return the windows of all rules, which have judged every step by then."""
        self.catch_up()
        return {name: rule.state_dict() for name, rule in self._rules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the windows of the rules that were saved; a rule that is new starts empty."""
        self._waiting, self._watchful = [], 0
        self.band, (self.low, self.high) = NEVER, NEVER
        for name, rule in self._rules.items():
            if name in state:
                rule.load_state_dict(state[name])
