"""The rules together: what is open now, root causes before their consequences."""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from gradtrack.config import GradientConfig
from gradtrack.diagnose import rules
from gradtrack.diagnose.evidence import Evidence
from gradtrack.diagnose.ledger import unmuted
from gradtrack.diagnose.rule import Rule
from gradtrack.reports import Issue
from gradtrack.signals import pass_on

_logger = logging.getLogger("gradtrack")


@cache
def rule_types() -> dict[str, type[Rule]]:
    """Return the rule of every file in `gradtrack.diagnose.rules`."""
    found: dict[str, type[Rule]] = {}
    for entry in pkgutil.iter_modules(rules.__path__):
        module = importlib.import_module(f"{rules.__name__}.{entry.name}")
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, Rule) and value.__module__ == module.__name__:
                found[entry.name] = value
    return found


class Health:
    """The rules of one (model, optimizer) pair, each with its own window."""

    def __init__(self) -> None:
        self._rules = {name: rule() for name, rule in rule_types().items()}

    def judge(self, evidence: Evidence, config: GradientConfig) -> list[Issue]:
        """Take in the evidence of one step and return the issues that are open, the most severe first."""
        found: list[Issue] = []
        for name, rule in list(self._rules.items()):
            try:
                found += rule.judge(evidence, config)
            except Exception as fault:  # a rule that fails must not stop the training
                pass_on(fault)
                _logger.warning("rule %s failed and is left out from now on", name, exc_info=True)
                del self._rules[name]
        if not found:
            return found
        return sorted(unmuted(found, config.mute), key=lambda issue: issue.severity, reverse=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the windows of all rules."""
        return {name: rule.state_dict() for name, rule in self._rules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the windows of the rules that were saved; a rule that is new starts empty."""
        for name, rule in self._rules.items():
            if name in state:
                rule.load_state_dict(state[name])
