"""Issues of an analyzer that looks now and then: which of them are about the run, and not about one look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradtrack.reports import Issue


class Recurring:
    """Counts issues over looks; those of the last look and those of at least half of all looks are the run's."""

    def __init__(self) -> None:
        self._looks = 0
        self._counts: dict[str, int] = {}
        self._last: dict[str, tuple[int, Issue]] = {}

    def add(self, issues: Sequence[Issue]) -> None:
        """Take in the issues of one look."""
        self._looks += 1
        for issue in issues:
            self._counts[issue.key] = self._counts.get(issue.key, 0) + 1
            self._last[issue.key] = (self._looks, issue)

    def issues(self) -> list[Issue]:
        """Return the issues of the run, each as it was found last."""
        return [
            issue
            for key, (look, issue) in self._last.items()
            if look == self._looks or 2 * self._counts[key] >= self._looks
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the issues as plain data."""
        last = {key: [look, issue.model_dump(mode="json")] for key, (look, issue) in self._last.items()}
        return {"looks": self._looks, "counts": dict(self._counts), "last": last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._looks, self._counts = int(state["looks"]), dict(state["counts"])
        self._last = {key: (look, Issue.model_validate(issue)) for key, (look, issue) in state["last"].items()}
