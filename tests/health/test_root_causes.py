"""The order of a diagnosis: causes first, consequences after them, each once and not too many."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack import registry
from gradtrack.health.open_issues import MOST, causes_of, order
from gradtrack.reports import Issue, IssueSeverity, IssueType


@pytest.fixture(autouse=True, scope="module")
def analyzers() -> None:
    """Load the analyzers, which say what explains their issues."""
    for name in registry.analyzers.builtin():
        registry.analyzers.load(name)


def issue(kind: str, layer: str = "", severity: str = "HIGH", step: int = 1) -> Issue:
    """Return an issue."""
    return Issue(issue_type=IssueType(kind), layer=layer, severity=IssueSeverity(severity), message="", step=step)


def test_causes_come_first() -> None:
    """Whatever order they were found in, a learning rate comes before the numbers that overflow because of it."""
    for found in permutations([issue("NUMERICAL", severity="CRITICAL"), issue("LR_TOO_HIGH"), issue("DEAD", "a")]):
        first, *rest = order(found)
        assert first.issue_type is IssueType.LR_TOO_HIGH
        assert {other.explained_by for other in rest} == {"LR_TOO_HIGH"}


def test_a_cause_is_not_later_than_its_consequence() -> None:
    """What came later explains nothing."""
    found = order([issue("DEAD", "a", step=4), issue("LR_TOO_HIGH", step=40)])
    assert all(one.explained_by is None for one in found)


def test_a_cause_that_takes_one_sample_more_to_see_is_still_one() -> None:
    """Two samples show that gradients vanish, three that units are saturated: the cause is found after what follows."""
    first, second = order([issue("VANISHING", "a", step=8), issue("SATURATION", "b", step=12)])
    assert (first.key, second.explained_by) == ("SATURATION:b", "SATURATION:b")
    assert all(
        one.explained_by is None for one in order([issue("VANISHING", "a", step=8), issue("DEAD", "b", step=40)])
    )


issues = st.builds(
    issue,
    st.sampled_from([kind.value for kind in IssueType]),
    st.sampled_from(["", "a", "b"]),
    st.sampled_from([severity.value for severity in IssueSeverity]),
    st.integers(1, 40),
)


@given(st.lists(issues, max_size=30))
def test_few_distinct_and_stable(found: list[Issue]) -> None:
    """At most a handful, each type and layer once, never INFO, and ordering again changes nothing."""
    ordered = order(found)
    assert len(ordered) <= MOST
    assert len({one.key for one in ordered}) == len(ordered)
    assert all(one.severity > IssueSeverity.INFO for one in ordered)
    assert {one.key for one in order(ordered)} == {one.key for one in ordered}


def test_each_analyzer_explains_its_own_types() -> None:
    """What explains the type of an issue is said once: by the rules, or by the analyzer that finds it."""
    analyzers = [registry.analyzers.load(name) for name in registry.analyzers.builtin()]
    own = [kind for analyzer in analyzers for kind in analyzer.explained_by]
    assert len(set(own)) == len(own)
    assert causes_of(IssueType.DEAD) == (IssueType.EQUAL_UNITS, IssueType.LR_TOO_HIGH, IssueType.EXPLODING)
    assert causes_of(IssueType.HEAD_REDUNDANCY) == (IssueType.RANK_COLLAPSE, IssueType.ATTN_ENTROPY_COLLAPSE)
    assert causes_of(IssueType.UNCHANGED) == ()
    for kind in IssueType:
        assert kind not in causes_of(kind)
