"""Which issues are open, and what changed with the step at hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gradtrack.reports import Issue, IssueSeverity, IssueType

_HARMFUL = (IssueType.NUMERICAL, IssueType.EXPLODING)


class Ledger:
    """The open issues of a pair, by type and layer."""

    def __init__(self) -> None:
        self._open: dict[str, IssueSeverity] = {}
        self._harm: dict[IssueType, Issue] = {}

    @property
    def harm(self) -> list[Issue]:
        """Return the first issue of each type that does harm even where it is over."""
        return list(self._harm.values())

    def remember(self, issues: Sequence[Issue]) -> None:
        """Keep what does harm of the issues that the rules find on one step."""
        for issue in issues:
            if issue.issue_type in _HARMFUL and issue.severity >= IssueSeverity.HIGH:
                self._harm.setdefault(issue.issue_type, issue)

    def update(self, issues: Sequence[Issue]) -> tuple[list[Issue], bool]:
        """Take the issues of one step; return those that have opened, and whether anything changed at all."""
        if not (issues or self._open):
            return [], False
        now = {issue.key: issue.severity for issue in issues}
        if now == self._open:
            return [], False
        opened = [issue for issue in issues if issue.key not in self._open]
        self._open = now
        return opened, True

    def state_dict(self) -> dict[str, Any]:
        """Return the open issues and those that did harm, as plain data."""
        opened = {key: severity.value for key, severity in self._open.items()}
        return {"open": opened, "harm": [issue.model_dump(mode="json") for issue in self.harm]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        harm = [Issue.model_validate(issue) for issue in state.get("harm", ())]
        self._open = {key: IssueSeverity(value) for key, value in state.get("open", {}).items()}
        self._harm = {issue.issue_type: issue for issue in harm}


def unmuted(issues: list[Issue], mute: Sequence[str]) -> list[Issue]:
    """Leave out issues whose type, layer (by regex) or TYPE:layer is muted."""
    return [issue for issue in issues if not any(_mutes(entry, issue) for entry in mute)] if mute else issues


def _mutes(entry: str, issue: Issue) -> bool:
    kind, _, layer = entry.partition(":")
    if kind.upper() == issue.issue_type.value:
        return not layer or re.search(layer, issue.layer) is not None
    return bool(issue.layer) and re.search(entry, issue.layer) is not None
