"""The issues of a run over time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradtrack.pages.issues import Episode
from gradtrack.reports import Issue, IssueSeverity, IssueType
from tests.pages.runs import gather, issue, row


def test_a_row_without_health_closes_no_issue() -> None:
    """A row with a late finding says nothing about the issues that are open."""
    run = gather(row(1, issues=[issue()]), row(1, metrics={"updates/ratio": 0.25}))
    assert [found.is_open for found in run.issues] == [True]


def test_issues_have_the_spans_in_which_they_were_open() -> None:
    """An issue may close and open again; its last end is open where the run ended with it."""
    sick = [issue()]
    run = gather(row(1), row(2, issues=sick), row(3, issues=sick), row(4), row(5, issues=sick))
    (found,) = run.issues
    assert found.spans == [(2, 4), (5, None)]
    assert found.is_open
    assert found.when == "steps 2 to 4 and from step 5"
    assert not run.healthy


@pytest.mark.parametrize(
    ("times", "told"),
    [(1, "steps 1 to 2"), (3, "steps 1 to 2, 3 to 4, 5 to 6"), (4, "steps 1 to 2, 3 to 4, 5 to 6 and once more")],
)
def test_many_spans_are_told_in_short(times: int, told: str) -> None:
    """The first three spans are told in full, and how many more there were."""
    run = gather(*(row(step, issues=[issue()] if step % 2 else []) for step in range(1, 2 * times + 1)))
    assert [found.when for found in run.issues] == [told]


def test_issues_of_two_pairs_are_two() -> None:
    """A row of one pair closes no issue of the other."""
    run = gather(row(1, issues=[issue()], source="D"), row(1, source="G"), row(2, source="G"))
    assert [(found.source, found.is_open) for found in run.issues] == [("D", True)]


def told(*episodes: Episode) -> list[tuple[str, list[str]]]:
    """Return the layers of episodes: that of each cause, and those of what followed."""
    return [(one.cause.text("layer"), [effect.text("layer") for effect in one.effects]) for one in episodes]


def test_open_and_severe_issues_come_first() -> None:
    """A person reads from the top."""
    mild = issue("mild").model_copy(update={"severity": IssueSeverity.LOW})
    closed, severe = issue("closed", IssueType.DISCONNECTED), issue("severe", IssueType.HEAD_REDUNDANCY)
    run = gather(row(1, issues=[mild, closed]), row(2, issues=[mild, severe]))
    assert told(*run.episodes) == [("severe", []), ("mild", []), ("closed", [])]


def measured(value: float, message: str, limit: float = 0.1) -> Issue:
    """Return an issue of one number."""
    return issue("").model_copy(update={"value": value, "threshold": limit, "message": message})


@pytest.mark.parametrize(("values", "worst"), [((0.2, 0.4, 0.0001), "0.4"), ((0.05, 0.01, 0.2), "0.01")])
def test_an_issue_shows_its_worst_step(values: tuple[float, ...], worst: str) -> None:
    """The value farthest on the side on which the issue opened is shown; the opening and the last are kept."""
    run = gather(*(row(step, issues=[measured(value, str(value))]) for step, value in enumerate(values, 1)))
    (found,) = run.issues
    assert (found.text("message"), found.worst_step, found.when) == (worst, 2, "from step 1, worst at step 2")
    assert (found.first["message"], found.last["message"]) == (str(values[0]), str(values[2]))


def test_a_graver_step_is_worse_than_a_larger_number() -> None:
    """Severity comes before the number, which may be missing."""
    grave = measured(0.2, "grave").model_copy(update={"severity": IssueSeverity.CRITICAL})
    unknown = measured(0.3, "unknown").model_copy(update={"value": None})
    run = gather(row(1, issues=[measured(0.3, "large")]), row(2, issues=[grave]), row(3, issues=[unknown]))
    assert [(found.text("message"), found.severity) for found in run.issues] == [("grave", IssueSeverity.CRITICAL)]


def explained(layer: str, by: str) -> Issue:
    """Return an issue that another one explains."""
    return issue(layer).model_copy(update={"explained_by": by, "severity": IssueSeverity.CRITICAL})


def test_what_a_cause_explains_is_its_episode() -> None:
    """Consequences, and consequences of those, are told below their cause from step to step, whatever is worse."""
    late, other = explained("late", "EXPLODING:a"), issue("b", IssueType.DISCONNECTED)
    chain = [explained("a.1", "EXPLODING:a"), explained("a.1.1", "EXPLODING:a.1"), issue("a"), other]
    run = gather(row(1, issues=chain), row(2, issues=[*chain, late]))
    assert told(*run.episodes) == [("a", ["a.1", "a.1.1", "late"]), ("b", [])]
    assert [found.text("layer") for found in run.issues] == ["a", "a.1", "a.1.1", "late", "b"]
    assert run.episodes[0].followed == "EXPLODING at a.1 and 2 more"


def test_one_mistake_of_a_hundred_steps_is_one_episode() -> None:
    """What follows from a learning rate by its type is told with it, while it lasts, soon after, and as it reopens."""
    rate = issue("", IssueType.LR_TOO_HIGH)
    dead = [issue(f"{layer}", IssueType.DEAD) for layer in range(9)]
    loss, late = issue("", IssueType.EXPLODING), issue("first", IssueType.VANISHING)
    during = [row(step, issues=[rate, *dead, loss]) for step in (8, 32)]
    run = gather(row(3, issues=[loss]), *during, row(128, issues=dead), row(192, issues=[*dead, late]))
    assert told(*run.episodes) == [("", ["", *map(str, range(9)), "first"])]
    (episode,) = run.episodes
    assert (episode.cause.key, episode.is_open, episode.cause.is_open) == ("LR_TOO_HIGH", True, False)


def test_what_happened_long_after_is_another_episode() -> None:
    """A cause explains what opens within a look of the analyzers from it, and nothing of another pair."""
    rate, dead = issue("", IssueType.LR_TOO_HIGH), issue("layer", IssueType.DEAD)
    steps = row(8, issues=[rate]), row(32), row(9, issues=[dead], source="other"), row(400, issues=[dead])
    assert [one.effects for one in gather(*steps).episodes] == [[], [], []]


def test_issues_that_explain_each_other_are_both_told() -> None:
    """What has no beginning is not left out."""
    circle = [explained("a", "EXPLODING:b"), explained("b", "EXPLODING:a"), explained("c", "EXPLODING:c")]
    assert sorted(found.text("layer") for found in gather(row(1, issues=circle)).issues) == ["a", "b", "c"]


def test_a_type_of_a_newer_version_is_told() -> None:
    """A journal may name a type or a severity that this version does not know."""
    found = {"issue_type": "NEW", "severity": "DIRE", "layer": "a", "message": "m"}
    run = gather(replace(row(1, issues=[issue("a")]), issues=(found,)))
    assert [(one.cause.place, one.cause.severity) for one in run.episodes] == [("NEW at a", IssueSeverity.MEDIUM)]
