"""Every rule over the sampled evidence of a run."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Final

from gradtrack.diagnose import rules
from gradtrack.diagnose.causes import MOST, order
from gradtrack.diagnose.sample import Case
from gradtrack.reports import Issue, IssueType

_OF_STEPS: Final = (IssueType.LR_TOO_HIGH,)
"""What is about the steps that were made, and not about what they have made of the model."""

_PLATEAUS: Final = (IssueType.VANISHING,)
"""What holds a training up, and so is over once the training has come out of it."""


@cache
def judges() -> dict[str, Callable[[Case], list[Issue]]]:
    """Return the function `judge` of every file in `gradtrack.diagnose.rules` that has one."""
    found: dict[str, Callable[[Case], list[Issue]]] = {}
    for entry in pkgutil.iter_modules(rules.__path__):
        module = importlib.import_module(f"{rules.__name__}.{entry.name}")
        if hasattr(module, "judge"):
            found[entry.name] = module.judge
    return found


def diagnose(case: Case, most: int = MOST) -> list[Issue]:
    """Return what is wrong with a run, root causes first.

    A rule about a state of the model looks at every window of the last samples, so that a fault which was there and has
    healed, or has been overtaken by its consequences, is still found. What was not there in the window before, and has
    come while training went well, is what the training made of the model, and no fault; nor is a plateau that the
    training has left behind, with the loss halved since.
    """
    found: dict[str, Issue] = {issue.key: issue for issue in case.standing}
    there: set[str] = set()
    for number, window in enumerate(case.windows):
        judged = _judge(window, "windowed")
        there = {issue.key for issue in judged}
        for issue in judged:
            known = found.get(issue.key)
            if known is not None:
                found[issue.key] = issue.model_copy(update={"step": known.step})
            elif not number or not _came_well(issue, window):
                found[issue.key] = issue
    lasting = [issue for key, issue in found.items() if key in there or not _is_left_behind(issue, case)]
    return order([*lasting, *_judge(case, "run")], most)


def _came_well(issue: Issue, window: Case) -> bool:
    """Whether a state was not there at first, and has come while training went well."""
    if issue.issue_type in _OF_STEPS or window.before is None:
        return False
    return window.series.has_learned_since(window.before)


def _is_left_behind(issue: Issue, case: Case) -> bool:
    return issue.issue_type in _PLATEAUS and case.series.has_halved_since(issue.step)


def judge_units(case: Case) -> list[Issue]:
    """Return what the units of the last samples show by themselves."""
    return _judge(case, "units")


def _judge(case: Case, kind: str) -> list[Issue]:
    return [issue for judge in judges().values() if getattr(judge, "kind", "run") == kind for issue in judge(case)]
