"""What an analyzer finds beside a training that goes well is no more of a fault after a checkpoint than before it."""

from __future__ import annotations

import json

import pytest

from gradtrack.analyzers.base import Series
from gradtrack.analyzers.recurrent import RecurrentAnalyzer
from gradtrack.analyzers.tools.issue_memory import LastingIssues, RecurringIssues
from gradtrack.analyzers.transformer import TransformerAnalyzer
from gradtrack.reports import Issue, IssueSeverity, IssueType


@pytest.mark.parametrize(
    ("kind", "issue_type"),
    [(TransformerAnalyzer, IssueType.RANK_COLLAPSE), (RecurrentAnalyzer, IssueType.SHORT_MEMORY)],
)
@pytest.mark.parametrize("halved", [True, False])
def test_a_checkpoint_keeps_why_a_state_is_no_fault(
    kind: type[TransformerAnalyzer | RecurrentAnalyzer], issue_type: IssueType, halved: bool
) -> None:
    """A state with which the loss has halved stays silent from the moment on that a checkpoint is loaded."""
    before, after, series = kind(), kind(), Series()
    for step in range(1, 41):
        series.append(0.0, 1.0 / step if halved else 1.0, (), finite=True)
    issue = Issue(issue_type=issue_type, severity=IssueSeverity.HIGH, layer="a", message="found")
    lasting, recurring = LastingIssues(), RecurringIssues()
    lasting.add([issue], 40, series)
    recurring.add([issue], series)
    before.load_state_dict((lasting if kind is TransformerAnalyzer else recurring).state_dict())
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert [found.issue_type for found in after.issues()] == ([] if halved else [issue_type])
    assert after.issues() == before.issues()
