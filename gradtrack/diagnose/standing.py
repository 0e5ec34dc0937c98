"""The verdicts on the last windows of samples that were given when their evidence was there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from gradtrack.analyzers.base import Series
from gradtrack.diagnose.doctor import judge_units
from gradtrack.diagnose.sample import KEPT_WINDOWS, RECENT, Case
from gradtrack.reports import Issue, IssueType


class Standing:
    """What the rules about units found in each of the last windows, so that no unit's numbers need be kept longer."""

    def __init__(self) -> None:
        self._found: deque[list[Issue]] = deque(maxlen=KEPT_WINDOWS + 1)
        self._absent: dict[str, int | None] = {}

    def add(self, case: Case) -> None:
        """Judge the newest window, and let go of what only older ones needed."""
        found = judge_units(case)
        known = {issue.key for issue in self._found[-1]} if self._found else ()
        self._absent |= {issue.key: case.before for issue in found if issue.key not in known}
        self._found.append(found)
        for sample in case.samples[: 1 - RECENT]:
            for node in sample.nodes:
                node.unit_max = node.unit_min = node.gram = None

    def issues(self, series: Series) -> list[Issue]:
        """Return each issue as it was found last, with the step at which it was found first.

        What was not there at first and has come while training went well is what the training made of the model, and
        what the loss has halved with all the same holds nothing up.
        """
        merged: dict[str, Issue] = {}
        for found in self._found:
            for issue in found:
                known = merged.get(issue.key)
                merged[issue.key] = issue if known is None else issue.model_copy(update={"step": known.step})
        return [issue for issue in merged.values() if not self._came_well(issue, series)]

    @property
    def from_start(self) -> frozenset[str]:
        """Return the keys of the issues that were there when units were judged first."""
        return frozenset(key for key, absent in self._absent.items() if absent is None)

    def _came_well(self, issue: Issue, series: Series) -> bool:
        if issue.issue_type is IssueType.BOTTLENECK:  # which is none where the loss has halved with it
            return series.has_halved
        absent = self._absent.get(issue.key)
        if absent is None or issue.issue_type is IssueType.SATURATION:  # which is judged by what comes through
            return False
        return series.has_learned_since(absent)

    def state_dict(self) -> dict[str, Any]:
        """Return the verdicts as plain data."""
        found = [[issue.model_dump(mode="json") for issue in found] for found in self._found]
        return {"found": found, "absent": dict(self._absent)}

    def load_state_dict(self, state: Mapping[str, Any] | list[list[Mapping[str, Any]]]) -> None:
        """Take back what `state_dict` returned, also that of older versions, which was the verdicts alone."""
        verdicts = state["found"] if isinstance(state, Mapping) else state
        self._found.clear()
        self._found.extend([Issue.model_validate(issue) for issue in found] for found in verdicts)
        if isinstance(state, Mapping):
            self._absent = dict(state["absent"])
