"""The open issues of a pair by type and layer, and their order: root causes before consequences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from gradtrack.analyzers.base import OFTEN_EVERY, OFTEN_UNTIL, Analyzer
from gradtrack.reports import Issue, IssueSeverity, IssueType

MOST: Final = 5
"""The most issues in a diagnosis: a longer list does not help the user to find the cause."""

T = IssueType
_CAUSES: Final[dict[IssueType, tuple[IssueType, ...]]] = {
    T.NUMERICAL: (T.EXPLODING, T.SUPERCRITICAL, T.LR_TOO_HIGH, T.UNSTABLE),
    T.EXPLODING: (T.SUPERCRITICAL, T.LR_TOO_HIGH, T.STALE_GRAD, T.UNSTABLE),
    T.LOSS_JUMP: (T.SUPERCRITICAL, T.LR_TOO_HIGH, T.STALE_GRAD, T.EXPLODING),
    T.UNSTABLE: (T.STALE_GRAD, T.LR_TOO_HIGH, T.SUPERCRITICAL, T.ROTATION),
    T.VANISHING: (
        *(T.DEAD, T.SATURATION, T.BOTTLENECK, T.RANK_COLLAPSE, T.SHORT_MEMORY, T.ATTN_ENTROPY_COLLAPSE),
        *(T.EXPLODING, T.LR_TOO_HIGH),
    ),
    T.CLIP_SATURATED: (T.EXPLODING, T.SUPERCRITICAL, T.LR_TOO_HIGH, T.STALE_GRAD),
}
"""What explains the types of issues that the rules find; each analyzer says it of the types that it alone finds."""
_NOT_MEANT: Final = (
    *(T.MISSING_LOG_SOFTMAX, T.NEGATED_LOSS, T.TARGET_RANGE, T.BROADCAST_LOSS, T.ACTIVATED_TWICE, T.SOFTMAX_DIMENSION),
    *(T.LR_NEGATIVE, T.ATTN_MASK, T.ATTN_SCALE, T.NO_SKIP, T.EQUAL_UNITS, T.EVAL_MODE),
)
"""A loss, a schedule or a model that is not what was meant, which explains whatever the rules find."""

NONFINITE_BATCH: Final = "nonfinite_batch"
"""The statistic of an issue about a batch with values that are not finite."""
NONFINITE_INPUT: Final = "nonfinite_input"
"""That of one about such values in what the model was given."""
NONFINITE_OUTPUT: Final = "nonfinite_output"
"""That of one about the module which makes such values out of finite ones."""
NONFINITE_GRADIENT: Final = "nonfinite_gradient"
"""That of one about the place where the backward pass does so."""
NONFINITE_WEIGHT: Final = "nonfinite_weight"
"""That of one about weights that are not finite, which an earlier step has made so."""
IN_DATA: Final = (NONFINITE_BATCH, NONFINITE_INPUT)
"""What nothing in the training explains."""
_NEAREST: Final = {NONFINITE_BATCH: 0, NONFINITE_INPUT: 1, NONFINITE_OUTPUT: 2, NONFINITE_GRADIENT: 2}
"""How near to the origin of numbers that are not finite such an issue is; all others are further."""
_FURTHER: Final = 3

_STATES: Final = (T.DEAD, T.SATURATION, T.BOTTLENECK)


def order(issues: Sequence[Issue], most: int = MOST) -> list[Issue]:
    """Return the issues, each once: the causes first, by severity and confidence, then their consequences."""
    merged = _once(issue for issue in issues if issue.severity > IssueSeverity.INFO)
    explained = [_explain(issue, merged) for issue in merged]
    explained.sort(
        key=lambda issue: precedence(
            issue.severity, issue.confidence, issue.step, is_explained=issue.explained_by is not None
        )
    )
    return _varied(explained)[:most]


def precedence(severity: IssueSeverity, confidence: float, step: int, *, is_explained: bool) -> tuple[Any, ...]:
    """Return what issues are sorted by, in a diagnosis and wherever a run is shown: a cause before consequences."""
    return is_explained, -_weight(severity, confidence), step


def _varied(issues: Sequence[Issue]) -> list[Issue]:
    """Put the first issue of every type before the second of any."""
    seen: Counter[IssueType] = Counter()
    places = {}
    for issue in issues:
        places[id(issue)] = seen[issue.issue_type]
        seen[issue.issue_type] += 1
    return sorted(issues, key=lambda issue: places[id(issue)])


def _once(issues: Iterable[Issue]) -> list[Issue]:
    """Return the most severe of several issues of one type at one layer; the first of those that tell as much."""
    best: dict[str, Issue] = {}
    for issue in issues:
        known = best.get(issue.key)
        if known is None or _told(issue) > _told(known):
            best[issue.key] = issue
    return list(best.values())


def _told(issue: Issue) -> tuple[float, int]:
    """Return what the issue is preferred by to others of its type at its layer: weight, and nearness to the origin."""
    return _weight(issue.severity, issue.confidence), -_NEAREST.get(issue.statistic, _FURTHER)


def _explain(issue: Issue, others: Sequence[Issue]) -> Issue:
    if issue.explained_by is not None:
        return issue
    for other in others:
        same = issue.issue_type is other.issue_type is T.NUMERICAL
        if same and is_origin(other.statistic, other.step, of=issue.statistic, at=issue.step):
            return issue.model_copy(update={"explained_by": other.key})
    if issue.statistic in IN_DATA:
        return issue
    for cause in causes_of(issue.issue_type):
        for other in others:
            if other.issue_type is cause and other.explained_by is None and _seen_from(other) <= issue.step:
                return issue.model_copy(update={"explained_by": other.key})
    return issue


def is_origin(statistic: str, step: int, *, of: str, at: int) -> bool:
    """Say whether a NUMERICAL issue with a statistic, from a step, is where one with another comes from."""
    if abs(step - at) > OFTEN_UNTIL:
        return False
    if of == NONFINITE_WEIGHT:
        return statistic != NONFINITE_WEIGHT and step <= at
    return _NEAREST.get(statistic, _FURTHER) < _NEAREST.get(of, _FURTHER)


def causes_of(kind: IssueType) -> tuple[IssueType, ...]:
    """Return the types of issues that may explain one of a type, the likeliest first."""
    own = (cause for analyzer in Analyzer.__subclasses__() for cause in analyzer.explained_by.get(kind, ()))
    return tuple(dict.fromkeys((*(_NOT_MEANT if kind in _CAUSES else ()), *_CAUSES.get(kind, ()), *own)))


def _seen_from(cause: Issue) -> int:
    """Return the step by which a cause was present; states of units are judged one sample after their effects."""
    if cause.issue_type is T.UNCHANGED:
        return cause.step - cause.window
    if cause.issue_type not in _STATES:
        return cause.step
    return cause.step - (OFTEN_EVERY if cause.step <= OFTEN_UNTIL else OFTEN_UNTIL)


def _weight(severity: IssueSeverity, confidence: float) -> float:
    return list(IssueSeverity).index(severity) + confidence


COLLAPSES: Final = (T.RANK_COLLAPSE, T.ATTN_ENTROPY_COLLAPSE)
"""What does harm as long as the loss has not come down since; analyzers find it."""
_HARMFUL: Final = (T.NUMERICAL, T.EXPLODING)
"""What does lasting harm, of what the rules find."""
_HARMFUL_OF_ANALYZERS: Final = (T.NUMERICAL, *COLLAPSES)


class OpenIssues:
    """The open issues of a pair, by type and layer."""

    def __init__(self) -> None:
        self._open: dict[str, IssueSeverity] = {}
        self._harm: dict[IssueType, Issue] = {}
        self._harm_of_analyzers: dict[IssueType, Issue] = {}

    @property
    def harm(self) -> list[Issue]:
        """Return the first issue of each type that does lasting harm, also after it has closed."""
        return [*self._harm.values(), *self._harm_of_analyzers.values()]

    def remember(self, issues: Sequence[Issue]) -> None:
        """Remember those issues of the rules at a step that do lasting harm."""
        _add_harm(self._harm, issues, _HARMFUL)

    def remember_of_analyzers(self, issues: Sequence[Issue]) -> None:
        """Remember those that analyzers have found."""
        _add_harm(self._harm_of_analyzers, issues, _HARMFUL_OF_ANALYZERS)

    def update(self, issues: Sequence[Issue]) -> tuple[list[Issue], bool]:
        """Update the open issues with those of one step; return the new ones, and whether any has opened or closed."""
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
        harm, of_analyzers = to_plain(self._harm.values()), to_plain(self._harm_of_analyzers.values())
        return {"open": opened, "harm": harm, "harm_of_analyzers": of_analyzers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._open = {key: IssueSeverity(value) for key, value in state.get("open", {}).items()}
        self._harm = {issue.issue_type: issue for issue in from_plain(state.get("harm", ()))}
        found = from_plain(state.get("harm_of_analyzers", ()))
        self._harm_of_analyzers = {issue.issue_type: issue for issue in found}


def _add_harm(known: dict[IssueType, Issue], issues: Sequence[Issue], kinds: Sequence[IssueType]) -> None:
    for issue in issues:
        if issue.issue_type in kinds and issue.severity >= IssueSeverity.HIGH:
            known.setdefault(issue.issue_type, issue)


def to_plain(issues: Iterable[Issue]) -> list[dict[str, Any]]:
    """Return issues as plain data, for a checkpoint."""
    return [issue.model_dump(mode="json") for issue in issues]


def from_plain(saved: Iterable[Mapping[str, Any]]) -> list[Issue]:
    """Return the issues that `to_plain` was given."""
    return list(map(Issue.model_validate, saved))


def unmuted(issues: list[Issue], mute: Sequence[str]) -> list[Issue]:
    """Leave out issues whose type, layer (by regex) or TYPE:layer is muted."""
    return [issue for issue in issues if not any(_mutes(entry, issue) for entry in mute)] if mute else issues


def _mutes(entry: str, issue: Issue) -> bool:
    kind, _, layer = entry.partition(":")
    if kind.upper() == issue.issue_type.value:
        return not layer or re.search(layer, issue.layer) is not None
    return bool(issue.layer) and re.search(entry, issue.layer) is not None
