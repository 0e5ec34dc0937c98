"""The verdicts on the last windows of samples that were given when their evidence was there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from gradtrack.diagnose.doctor import judge_units
from gradtrack.diagnose.sample import KEPT_WINDOWS, RECENT, Case
from gradtrack.reports import Issue


class Standing:
    """What the rules about units found in each of the last windows, so that no unit's numbers need be kept longer."""

    def __init__(self) -> None:
        self._found: deque[list[Issue]] = deque(maxlen=KEPT_WINDOWS + 1)

    def add(self, case: Case) -> None:
        """Judge the newest window, and let go of what only older ones needed."""
        self._found.append(judge_units(case))
        for sample in case.samples[: 1 - RECENT]:
            for node in sample.nodes:
                node.unit_max = node.unit_min = node.gram = None

    def issues(self) -> list[Issue]:
        """Return each issue as it was found last, with the step at which it was found first."""
        merged: dict[str, Issue] = {}
        for found in self._found:
            for issue in found:
                known = merged.get(issue.key)
                merged[issue.key] = issue if known is None else issue.model_copy(update={"step": known.step})
        return list(merged.values())

    def state_dict(self) -> list[list[dict[str, Any]]]:
        """Return the verdicts as plain data."""
        return [[issue.model_dump(mode="json") for issue in found] for found in self._found]

    def load_state_dict(self, state: list[list[Mapping[str, Any]]]) -> None:
        """Take back what `state_dict` returned."""
        self._found.clear()
        self._found.extend([Issue.model_validate(issue) for issue in found] for found in state)
