"""Ranks that share the parameters add up the verdicts of their analyzers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradtrack import Issue, IssueSeverity, IssueType
from gradtrack.step.analyzers import NUM_VERDICTS, exchanges_verdicts, pack, unpack

ISSUES = st.builds(
    Issue,
    issue_type=st.sampled_from(list(IssueType)[:3]),
    severity=st.sampled_from(list(IssueSeverity)[1:]),
    layer=st.sampled_from(["", "0", "1"]),
    message=st.just(""),
)


@given(st.lists(st.lists(ISSUES, max_size=4), min_size=1, max_size=9))
def test_what_most_ranks_find_is_an_issue(ranks: list[list[Issue]]) -> None:
    """A type opens where more than half have it, as severe as the worst of each rank are on average."""
    sums = np.sum([pack(issues) for issues in ranks], axis=0).tolist()
    found = {issue.issue_type: issue for issue in unpack(sums, len(ranks), 10)}
    order = list(IssueSeverity)
    for kind in IssueType:
        worst = [max((order.index(i.severity) for i in one if i.issue_type is kind), default=None) for one in ranks]
        there = [place for place in worst if place is not None]
        assert (kind in found) == (2 * len(there) > len(ranks))
        if kind in found:
            assert abs(order.index(found[kind].severity) - np.mean(there)) <= 0.5
            assert (found[kind].value, found[kind].layer, found[kind].step) == (len(there), "", 10)


def test_a_thousand_ranks_fit_into_one_number() -> None:
    """Neither the count nor the severities run into each other."""
    issue = Issue(issue_type=IssueType.DEAD, severity=IssueSeverity.CRITICAL, message="")
    (found,) = unpack([65_000 * number for number in pack([issue])], 65_000, 10)
    assert (found.value, found.severity) == (65_000, IssueSeverity.CRITICAL)


def test_when_verdicts_are_exchanged() -> None:
    """Two steps after an analysis that costs much, and not before any."""
    assert [step for step in range(1, 60) if exchanges_verdicts(step)] == [4, 10, 34]
    assert len(IssueType) == NUM_VERDICTS
