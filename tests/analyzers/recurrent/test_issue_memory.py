"""Which issues of single looks are about the run."""

from __future__ import annotations

import json

from gradtrack.analyzers.tools.issue_memory import RecurringIssues
from gradtrack.reports import Issue, IssueSeverity, IssueType

FAULT = Issue(
    issue_type=IssueType.SHORT_MEMORY, severity=IssueSeverity.MEDIUM, layer="rnn", message="short", value=1e-9
)


def after(*looks: list[Issue]) -> RecurringIssues:
    """Take in several looks."""
    history = RecurringIssues()
    for issues in looks:
        history.add(issues, None)
    return history


def test_a_fault_of_the_last_look_is_one_of_the_run() -> None:
    """An issue of the last look counts, however rare it was before."""
    assert after([], [], [], [FAULT]).issues() == [FAULT]


def test_a_fault_of_half_of_the_looks_is_one_of_the_run() -> None:
    """What was there for long did its harm, although it is over."""
    assert after([FAULT], [FAULT], [], []).issues() == [FAULT]
    assert after([FAULT], [], []).issues() == []


def test_the_state_is_plain_data() -> None:
    """It survives JSON, and counting goes on from it."""
    history, restored = after([FAULT], []), RecurringIssues()
    restored.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert restored.issues() == history.issues() == [FAULT]
    restored.add([], None)
    assert restored.issues() == []
