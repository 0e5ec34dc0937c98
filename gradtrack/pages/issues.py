"""The issues of a run over time: when each opened and closed, with its latest text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gradtrack.records import Record
from gradtrack.reports import IssueSeverity

_SPANS: Final = 3
ADVICE: Final = {False: "What to do", True: "If it stays without that"}
"""The text before the advice on an issue; for a consequence it says to fix the cause first."""


@dataclass(slots=True, kw_only=True)
class IssueHistory:
    """An issue of a run: its latest text and the steps between which it was open; None is an end not reached."""

    key: str
    source: str
    latest: Mapping[str, Any]
    severity: IssueSeverity
    spans: list[tuple[int, int | None]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether the issue was open at the end."""
        return self.spans[-1][1] is None

    def text(self, name: str) -> str:
        """Return a field of the issue as text; empty where it has none."""
        return str(self.latest.get(name) or "")

    @property
    def cause(self) -> str:
        """Return the issue that explains this one; empty without one."""
        return self.text("explained_by")

    @property
    def first_step(self) -> int:
        """Return the step on which the issue opened first."""
        return self.spans[0][0]

    @property
    def when(self) -> str:
        """Return in words when the issue was open."""
        spans = [f"{start} to {end}" for start, end in self.spans if end is not None]
        told = [f"steps {', '.join(spans[:_SPANS])}"] if spans else []
        if len(spans) > _SPANS:
            told.append("once more" if len(spans) == _SPANS + 1 else f"{len(spans) - _SPANS} times more")
        if self.is_open:
            told.append(f"from step {self.spans[-1][0]}")
        return told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"


class IssueLog:
    """Collects the issues of a run row by row; a row with the health of its pair names all that are open."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], IssueHistory] = {}
        self._open: dict[str, set[str]] = {}

    def add(self, record: Record) -> None:
        """Add a row."""
        if not record.tells_health:
            return
        before, now = self._open.get(record.source, set()), set[str]()
        for issue in record.issues:
            kind, layer = str(issue.get("issue_type", "")), str(issue.get("layer", ""))
            key = f"{kind}:{layer}" if layer else kind
            now.add(key)
            severity = _severity(issue.get("severity"))
            history = self._found.setdefault(
                (record.source, key), IssueHistory(key=key, source=record.source, latest=issue, severity=severity)
            )
            if key not in before:
                history.spans.append((record.step, None))
            history.latest, history.severity = issue, max(history.severity, severity)
        for key in before - now:
            history = self._found[record.source, key]
            history.spans[-1] = (history.spans[-1][0], record.step)
        self._open[record.source] = now

    def ordered(self) -> list[IssueHistory]:
        """Return the issues by openness, severity and time, each followed by what it explains."""
        ranked = sorted(
            self._found.values(),
            key=lambda issue: (issue.is_open, not issue.cause, issue.severity, -issue.first_step),
            reverse=True,
        )
        return _with_effects(ranked)


def _with_effects(ranked: Sequence[IssueHistory]) -> list[IssueHistory]:
    """Place the consequences of an issue behind it, if both are open or both are closed."""
    known = {(issue.source, issue.key): issue for issue in ranked}
    effects: dict[tuple[str, str], list[IssueHistory]] = {}
    for issue in ranked:
        cause = known.get((issue.source, issue.cause))
        if cause is not None and cause.is_open == issue.is_open:
            effects.setdefault((cause.source, cause.key), []).append(issue)
    explained = {id(issue) for found in effects.values() for issue in found}
    placed: dict[int, IssueHistory] = {}
    # Issues that explain each other in a circle come after the others.
    for start in [*(issue for issue in ranked if id(issue) not in explained), *ranked]:
        waiting = [start]
        while waiting:
            issue = waiting.pop()
            if id(issue) not in placed:
                placed[id(issue)] = issue
                waiting += reversed(effects.get((issue.source, issue.key), ()))
    return sorted(placed.values(), key=lambda issue: not issue.is_open)


def _severity(name: object) -> IssueSeverity:
    try:
        return IssueSeverity(name)
    except ValueError:
        return IssueSeverity.MEDIUM
