"""The issues of a run over time."""

from __future__ import annotations

import pytest

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


def test_open_and_severe_issues_come_first() -> None:
    """A person reads from the top."""
    mild = issue("mild").model_copy(update={"severity": IssueSeverity.LOW})
    closed = issue("closed", IssueType.NUMERICAL)
    run = gather(row(1, issues=[mild, closed]), row(2, issues=[mild, issue("severe")]))
    assert [found.latest["layer"] for found in run.issues] == ["severe", "mild", "closed"]


def test_causes_come_before_what_they_explain() -> None:
    """A person reads first what to mend, whatever is worse."""
    worse = {"severity": IssueSeverity.CRITICAL, "explained_by": "EXPLODING:cause"}
    run = gather(row(1, issues=[issue("effect").model_copy(update=worse), issue("cause")]))
    assert [found.latest["layer"] for found in run.issues] == ["cause", "effect"]


def explained(layer: str, by: str) -> Issue:
    """Return an issue that another one explains."""
    return issue(layer).model_copy(update={"explained_by": by})


def test_what_a_cause_explains_follows_it() -> None:
    """A person reads each cause with its consequences, and consequences of those, before the next cause."""
    chain = [issue("a"), explained("a.1", "EXPLODING:a"), explained("a.1.1", "EXPLODING:a.1"), issue("b")]
    run = gather(row(1, issues=[*reversed(chain), explained("b.1", "EXPLODING:b"), explained("c.1", "EXPLODING:gone")]))
    layers = [found.latest["layer"] for found in run.issues]
    assert sorted(layers) == ["a", "a.1", "a.1.1", "b", "b.1", "c.1"]
    assert layers.index("a.1") == layers.index("a") + 1
    assert layers.index("a.1.1") == layers.index("a.1") + 1
    assert layers.index("b.1") == layers.index("b") + 1
    assert layers[-1] == "c.1"


def test_issues_that_explain_each_other_are_both_told() -> None:
    """What has no beginning is not left out, and what is closed does not stand between the open ones."""
    circle = [explained("a", "EXPLODING:b"), explained("b", "EXPLODING:a"), explained("c", "EXPLODING:c")]
    run = gather(row(1, issues=[*circle, issue("old")]), row(2, issues=[*circle, explained("late", "EXPLODING:old")]))
    layers = [found.latest["layer"] for found in run.issues]
    assert sorted(layers) == ["a", "b", "c", "late", "old"]
    assert layers[-1] == "old"
