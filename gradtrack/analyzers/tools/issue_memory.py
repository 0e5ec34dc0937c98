"""What an analyzer remembers between looks: the issues that it found, and the notes that it gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gradtrack.analyzers.base import OFTEN_EVERY, Series
from gradtrack.reports import Issue, IssueSeverity, IssueType

_LOOKS: Final = 3
_SUDDEN: Final = 0.1
_HARMLESS: Final = (IssueType.RANK_COLLAPSE, IssueType.HEAD_REDUNDANCY)
"""Types of issues that are no fault where the loss has halved all the same."""


@dataclass(slots=True)
class _Seen:
    """An issue of the last looks: how often in a row, the step of the last look without it, and how it came."""

    issue: Issue
    looks: int
    absent: int | None
    sudden: bool = False


class Lasting:
    """The issues of successive looks. One that was absent at first, and came while training went well, is no fault.

    Training makes such an issue gradually: one at a tenth of its threshold, a few steps after a look without it, has
    another cause.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._step: int | None = None
        self._seen: dict[str, _Seen] = {}

    def add(self, issues: Sequence[Issue], step: int) -> None:
        """Add the issues of one look."""
        before, self._seen = self._seen, {}
        for issue in issues:
            known = before.get(issue.key) or _Seen(issue, 0, self._step, self._is_sudden(issue, step))
            self._seen[issue.key] = replace(known, issue=issue, looks=known.looks + 1)
        self._looks += 1
        self._step = step

    def _is_sudden(self, issue: Issue, step: int) -> bool:
        if self._step is None or step - self._step > OFTEN_EVERY or issue.value is None or issue.threshold is None:
            return False
        return issue.value < _SUDDEN * issue.threshold

    def issues(self, series: Series | None, firm: Container[IssueType] = ()) -> list[Issue]:
        """Return the issues of the run; those of a `firm` type count as soon as they are there, however they came."""
        return [seen.issue for seen in self._seen.values() if self._counts(seen, series, firm)]

    def _counts(self, seen: _Seen, series: Series | None, firm: Container[IssueType]) -> bool:
        if seen.issue.severity is IssueSeverity.CRITICAL or seen.issue.issue_type in firm:
            return True
        if seen.looks < min(_LOOKS, self._looks):
            return False
        if seen.issue.issue_type in _HARMLESS and series is not None and series.has_halved:
            return False
        return seen.sudden or seen.absent is None or series is None or not series.has_learned_since(seen.absent)

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        seen = [(one.issue.model_dump(mode="json"), one.looks, one.absent, one.sudden) for one in self._seen.values()]
        return {"looks": self._looks, "step": self._step, "seen": seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._looks, self._step = int(state["looks"]), state["step"]
        found = [_Seen(Issue.model_validate(issue), *rest) for issue, *rest in state["seen"]]
        self._seen = {one.issue.key: one for one in found}


class Recurring:
    """Counts of issues over looks: the run has those of the last look, and those of at least half of all looks."""

    def __init__(self) -> None:
        self._looks = 0
        self._counts: Counter[str] = Counter()
        self._last: dict[str, tuple[int, Issue]] = {}

    def add(self, issues: Sequence[Issue]) -> None:
        """Add the issues of one look."""
        self._looks += 1
        self._counts.update(issue.key for issue in issues)
        self._last.update({issue.key: (self._looks, issue) for issue in issues})

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
        self._looks, self._counts = int(state["looks"]), Counter(state["counts"])
        self._last = {key: (look, Issue.model_validate(issue)) for key, (look, issue) in state["last"].items()}


class Notes:
    """Notes of an analyzer, of which each is given once."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._pending: list[str] = []

    def add(self, note: str) -> None:
        """Keep a note for the next `take`, unless it was added before."""
        if note not in self._given:
            self._given.add(note)
            self._pending.append(note)

    def take(self) -> list[str]:
        """Return the new notes."""
        taken, self._pending = self._pending, []
        return taken

    def __bool__(self) -> bool:
        return bool(self._pending)
