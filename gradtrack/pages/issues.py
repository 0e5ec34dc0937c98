"""The issues of a run over time, grouped into episodes: one cause with what followed from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gradtrack import registry
from gradtrack.analyzers.base import OFTEN_UNTIL
from gradtrack.health.open_issues import IN_DATA, causes_of, is_origin, precedence
from gradtrack.records import Record
from gradtrack.reports import IssueSeverity, IssueType

_NUMERICAL: Final = IssueType.NUMERICAL.value
_SPANS: Final = 3
_APART: Final = OFTEN_UNTIL
"""So many steps a cause may be found before or after what follows from it: analyzers look at every 64th step."""
ADVICE: Final = {False: "What to do", True: "If it stays without that"}
"""The text before the advice on an issue; for a consequence it says to fix the cause first."""


@dataclass(slots=True, kw_only=True)
class IssueHistory:
    """An issue of a run as it opened, at its worst and as last told, and the steps between which it was open.

    None is an end not reached. What is shown of it is its worst.
    """

    key: str
    source: str
    first: Mapping[str, Any]
    worst: Mapping[str, Any]
    last: Mapping[str, Any]
    worst_step: int
    cause: str = ""
    """The key of the issue that was last said to explain this one; empty without one."""
    spans: list[tuple[int, int | None]] = field(default_factory=list)

    def add(self, issue: Mapping[str, Any], step: int) -> None:
        """Take in how the issue stood at a step."""
        if (_severity(issue), self._excess(issue)) > (self.severity, self._excess(self.worst)):
            self.worst, self.worst_step = issue, step
        self.last, self.cause = issue, str(issue.get("explained_by") or self.cause)

    def _excess(self, issue: Mapping[str, Any]) -> float:
        """Return how far its value is on that side of the limit on which the issue opened."""
        value, opening, limit = issue.get("value"), self.first.get("value"), self.first.get("threshold")
        if not isinstance(value, (int, float)) or not isinstance(opening, (int, float)):
            return 0.0
        return -value if isinstance(limit, (int, float)) and opening < limit else value

    @property
    def severity(self) -> IssueSeverity:
        """Return the severity of the issue at its worst."""
        return _severity(self.worst)

    @property
    def is_open(self) -> bool:
        """Whether the issue was open at the end."""
        return self.spans[-1][1] is None

    def text(self, name: str) -> str:
        """Return a field of the issue at its worst as text; empty where it has none."""
        return str(self.worst.get(name) or "")

    @property
    def place(self) -> str:
        """Return type and layer of the issue in words."""
        return " at ".join(filter(None, (self.text("issue_type"), self.text("layer"))))

    @property
    def first_step(self) -> int:
        """Return the step on which the issue opened first."""
        return self.spans[0][0]

    @property
    def when(self) -> str:
        """Return in words when the issue was open, and when it was at its worst."""
        spans = [f"{start} to {end}" for start, end in self.spans if end is not None]
        told = [f"steps {', '.join(spans[:_SPANS])}"] if spans else []
        if len(spans) > _SPANS:
            told.append("once more" if len(spans) == _SPANS + 1 else f"{len(spans) - _SPANS} times more")
        if self.is_open:
            told.append(f"from step {self.spans[-1][0]}")
        when = told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"
        return when if self.worst_step == self.first_step else f"{when}, worst at step {self.worst_step}"

    def is_made_by(self, other: IssueHistory) -> bool:
        """Say whether numbers that are not finite come from those of another issue."""
        kinds = {self.text("issue_type"), other.text("issue_type")}
        statistic, step = self.text("statistic"), self.first_step
        return kinds == {_NUMERICAL} and is_origin(other.text("statistic"), other.first_step, of=statistic, at=step)

    def was_near(self, step: int) -> bool:
        """Say whether the issue was open at a step, or within one look of the analyzers from it."""
        return any(start - _APART <= step and (end is None or step <= end + _APART) for start, end in self.spans)


@dataclass(frozen=True, slots=True)
class Episode:
    """An issue with what followed from it, directly or through others, from step to step."""

    cause: IssueHistory
    effects: list[IssueHistory] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether any of its issues was open at the end."""
        return self.cause.is_open or any(issue.is_open for issue in self.effects)

    @property
    def followed(self) -> str:
        """Return in words what followed, each type of issue once."""
        places: dict[str, list[str]] = {}
        for issue in self.effects:
            places.setdefault(issue.text("issue_type"), []).append(issue.place)
        return ", ".join(found[0] + (f" and {len(found) - 1} more" * (len(found) > 1)) for found in places.values())


class IssueLog:
    """Collects the issues of a run row by row; a row with the health of its pair names all that are open."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], IssueHistory] = {}
        self._open: dict[str, set[str]] = {}

    def add(self, record: Record) -> None:
        """Add a row."""
        if not record.tells_health:
            return
        source, step = record.source, record.step
        before, now = self._open.get(source, set()), set[str]()
        for issue in record.issues:
            kind, layer = str(issue.get("issue_type", "")), str(issue.get("layer", ""))
            key = f"{kind}:{layer}" if layer else kind
            now.add(key)
            history = self._found.setdefault(
                (source, key),
                IssueHistory(key=key, source=source, first=issue, worst=issue, last=issue, worst_step=step),
            )
            if key not in before:
                history.spans.append((step, None))
            history.add(issue, step)
        for key in before - now:
            history = self._found[source, key]
            history.spans[-1] = (history.spans[-1][0], step)
        self._open[source] = now

    def episodes(self) -> list[Episode]:
        """Return the episodes of the run."""
        return episodes_of(self._found.values())


def episodes_of(issues: Iterable[IssueHistory]) -> list[Episode]:
    """Return issues as episodes, those that are open first; their causes are in the order of every diagnosis.

    What explains an issue is the one that it names, or else one that was there at that time and is of a type that may
    explain it, or is more important and of its own type.
    """
    ranked = sorted(issues, key=_precedence)
    by_kind: dict[tuple[str, str], list[IssueHistory]] = {}
    for issue in ranked:
        by_kind.setdefault((issue.source, issue.text("issue_type")), []).append(issue)
    known = {(issue.source, issue.key): issue for issue in ranked}
    causes: dict[int, IssueHistory] = {}

    def root(issue: IssueHistory) -> IssueHistory:
        while id(issue) in causes:
            issue = causes[id(issue)]
        return issue

    def candidates(issue: IssueHistory) -> Iterator[IssueHistory]:
        yield from (one for one in by_kind.get((issue.source, _NUMERICAL), ()) if issue.is_made_by(one))
        if issue.text("statistic") in IN_DATA:
            return
        if (issue.source, issue.cause) in known:
            yield known[issue.source, issue.cause]
        for kind in _causes_of(issue.text("issue_type")):
            yield from (one for one in by_kind.get((issue.source, kind), ()) if one.was_near(issue.first_step))
        same = by_kind[issue.source, issue.text("issue_type")]
        yield from (one for one in same[: same.index(issue)] if one.was_near(issue.first_step))

    for issue in ranked:
        cause = next((one for one in candidates(issue) if root(one) is not issue), None)
        if cause is not None:
            causes[id(issue)] = cause
    found = {id(issue): Episode(issue) for issue in ranked if id(issue) not in causes}
    for issue in sorted(ranked, key=lambda issue: issue.first_step):
        if id(issue) in causes:
            found[id(root(issue))].effects.append(issue)
    return sorted(found.values(), key=lambda episode: not episode.is_open)


def _precedence(issue: IssueHistory) -> tuple[Any, ...]:
    confidence = issue.worst.get("confidence")
    known = confidence if isinstance(confidence, (int, float)) else 1.0
    return precedence(issue.severity, known, issue.first_step, is_explained=bool(issue.cause))


def _causes_of(kind: str) -> list[str]:
    """Return the types of issues that may explain one of a type; none for a type that this version does not know."""
    for name in registry.analyzers.builtin():
        registry.analyzers.load(name)
    return [cause.value for cause in causes_of(IssueType(kind))] if kind in IssueType.__members__ else []


def _severity(issue: Mapping[str, Any]) -> IssueSeverity:
    try:
        return IssueSeverity(issue.get("severity"))
    except ValueError:
        return IssueSeverity.MEDIUM
