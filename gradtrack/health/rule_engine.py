"""The rule engine: runs all health rules on each step, and finds the band in which no issue can open."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any, Final, TypeVar

from gradtrack.config import GradientConfig
from gradtrack.health.open_issues import unmuted
from gradtrack.health.rule import ANY, Band, CalmSteps, Evidence, Rule
from gradtrack.health.rules.norm import SpikeRule, UnstableRule, VanishingRule
from gradtrack.health.rules.values import ClipSaturatedRule, LossJumpRule, NoGradientsRule, NumericalRule, UnchangedRule
from gradtrack.reports import Issue
from gradtrack.support.interrupts import pass_on

NEVER: Final[Band] = (math.inf, -math.inf)
_severity = attrgetter("severity")
Answer = TypeVar("Answer")
_logger = logging.getLogger("gradtrack")


RULES: Final[Mapping[str, type[Rule]]] = {
    "clip_saturated": ClipSaturatedRule,
    "loss_jump": LossJumpRule,
    "no_gradients": NoGradientsRule,
    "numerical": NumericalRule,
    "spike": SpikeRule,
    "unchanged": UnchangedRule,
    "unstable": UnstableRule,
    "vanishing": VanishingRule,
}
"""The rules by their names in a checkpoint."""


class Health:
    """The rules of one (model, optimizer) pair, each with its own window.

    The fast path passes steps whose norms are within the `band` to `remember`, several together, without judging them.
    """

    def __init__(self) -> None:
        self._rules = {name: rule() for name, rule in RULES.items()}

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        """Remember the evidence of one step and return the issues that are open, the most severe first."""
        found = list(chain.from_iterable(self._ask(lambda rule: rule.judge(evidence, config))))
        return sorted(unmuted(found, config.mute), key=_severity, reverse=True) if found else found

    def band(self, config: GradientConfig) -> Band:
        """Return the band of ln of the norm in which no rule opens an issue, see `Rule.calm`."""
        low, high = ANY
        for band in self._ask(lambda rule: rule.calm(config)):
            if band is None:
                return NEVER
            low, high = max(low, band[0]), min(high, band[1])
        return low, high

    def remember(self, steps: CalmSteps) -> None:
        """Update the rules with steps that were within the band."""
        self._ask(lambda rule: rule.remember(steps))

    def _ask(self, question: Callable[[Rule], Answer]) -> list[Answer]:
        """Return the answer of every rule; a rule that raises is removed, so that it never stops the training."""
        answers: list[Answer] = []
        for name, rule in list(self._rules.items()):
            try:
                answers.append(question(rule))
            except Exception as fault:
                pass_on(fault)
                _logger.warning("rule %s failed and is left out from now on", name, exc_info=True)
                del self._rules[name]
        return answers

    def state_dict(self) -> dict[str, Any]:
        """Return the windows of all rules."""
        return {name: rule.state_dict() for name, rule in self._rules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the windows of the rules that were saved; a rule that is new starts empty."""
        for name, rule in self._rules.items():
            if name in state:
                rule.load_state_dict(state[name])
