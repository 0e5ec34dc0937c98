"""What an analyzer remembers between looks: the issues that it found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gradtrack.analyzers.base import OFTEN_EVERY, Series
from gradtrack.reports import Issue, IssueSeverity, IssueType

_LOOKS: Final = 3
_SUDDEN: Final = 0.1


class IssueMemory:
    """The issues of successive looks, and the losses; `harmless` types are no fault where the loss has halved."""

    def __init__(self, harmless: Container[IssueType] = ()) -> None:
        self._harmless = harmless
        self._looks = 0
        self._series: Series | None = None

    def _is_harmless(self, issue: Issue) -> bool:
        return issue.issue_type in self._harmless and self._series is not None and self._series.has_halved

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {"looks": self._looks, "series": None if self._series is None else self._series.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._looks = int(state["looks"])
        if state.get("series") is not None:
            self._series = Series()
            self._series.load_state_dict(state["series"])


@dataclass(slots=True)
class _Seen:
    """An issue of the last looks: how often in a row, the step of the last look without it, and how it came."""

    issue: Issue
    looks: int
    absent: int | None
    sudden: bool = False


class LastingIssues(IssueMemory):
    """The issues of successive looks. One that was absent at first, and came while training went well, is no fault.

    Training makes such an issue gradually: one at a tenth of its threshold, a few steps after a look without it, has
    another cause.
    """

    def __init__(self, harmless: Container[IssueType] = ()) -> None:
        super().__init__(harmless)
        self._step: int | None = None
        self._seen: dict[str, _Seen] = {}

    def add(self, issues: Sequence[Issue], step: int, series: Series | None) -> None:
        """Add the issues of one look, with the losses up to then."""
        before, self._seen = self._seen, {}
        for issue in issues:
            known = before.get(issue.key) or _Seen(issue, 0, self._step, self._is_sudden(issue, step))
            self._seen[issue.key] = replace(known, issue=issue, looks=known.looks + 1)
        self._looks += 1
        self._step, self._series = step, series

    def _is_sudden(self, issue: Issue, step: int) -> bool:
        if self._step is None or step - self._step > OFTEN_EVERY or issue.value is None or issue.threshold is None:
            return False
        return issue.value < _SUDDEN * issue.threshold

    def issues(self, firm: Container[IssueType] = ()) -> list[Issue]:
        """Return the issues of the run; those of a `firm` type count as soon as they are there, however they came."""
        return [seen.issue for seen in self._seen.values() if self._counts(seen, firm)]

    def _counts(self, seen: _Seen, firm: Container[IssueType]) -> bool:
        if seen.issue.severity is IssueSeverity.CRITICAL or seen.issue.issue_type in firm:
            return True
        if seen.looks < min(_LOOKS, self._looks) or self._is_harmless(seen.issue):
            return False
        series = self._series
        return seen.sudden or seen.absent is None or series is None or not series.has_learned_since(seen.absent)

    def state_dict(self) -> dict[str, Any]:
        seen = [(one.issue.model_dump(mode="json"), one.looks, one.absent, one.sudden) for one in self._seen.values()]
        return {**super().state_dict(), "step": self._step, "seen": seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._step = state["step"]
        found = [_Seen(Issue.model_validate(issue), *rest) for issue, *rest in state["seen"]]
        self._seen = {one.issue.key: one for one in found}


class RecurringIssues(IssueMemory):
    """Counts of issues over looks: the run has those of the last look, and those of at least half of all looks."""

    def __init__(self, harmless: Container[IssueType] = ()) -> None:
        super().__init__(harmless)
        self._counts: Counter[str] = Counter()
        self._last: dict[str, tuple[int, Issue]] = {}

    def add(self, issues: Sequence[Issue], series: Series | None) -> None:
        """Add the issues of one look, with the losses up to then."""
        self._looks, self._series = self._looks + 1, series
        self._counts.update(issue.key for issue in issues)
        self._last.update({issue.key: (self._looks, issue) for issue in issues})

    def issues(self) -> list[Issue]:
        """Return the issues of the run, each as it was found last."""
        return [
            issue
            for key, (look, issue) in self._last.items()
            if (look == self._looks or 2 * self._counts[key] >= self._looks) and not self._is_harmless(issue)
        ]

    def state_dict(self) -> dict[str, Any]:
        last = {key: [look, issue.model_dump(mode="json")] for key, (look, issue) in self._last.items()}
        return {**super().state_dict(), "counts": dict(self._counts), "last": last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._counts = Counter(state["counts"])
        self._last = {key: (look, Issue.model_validate(issue)) for key, (look, issue) in state["last"].items()}
