"""Issues of an analyzer that looks often count where they last and learning has not brought them about."""

from __future__ import annotations

import json

import pytest

from gradtrack.analyzers.base import Series
from gradtrack.analyzers.tools.issue_memory import LastingIssues
from gradtrack.reports import Issue, IssueSeverity, IssueType

COLLAPSE = Issue(
    issue_type=IssueType.ATTN_ENTROPY_COLLAPSE, severity=IssueSeverity.HIGH, layer="a", message="collapsed"
)
BROKEN = COLLAPSE.model_copy(update={"issue_type": IssueType.NUMERICAL, "severity": IssueSeverity.CRITICAL})


def followed(found: list[list[Issue]], losses: list[float], every: int = 4) -> LastingIssues:
    """Look at a run on every fourth step, which has a loss on each."""
    series, lasting = Series(), LastingIssues()
    for step, loss in enumerate(losses, start=1):
        series.append(0.0, loss, (), finite=True)
        if step % every == 0 and found[step // every - 1 : step // every]:
            lasting.add(found[step // every - 1], step, series)
    return lasting


def keys(lasting: LastingIssues) -> list[str]:
    """Return the types that count."""
    return [issue.issue_type.value for issue in lasting.issues()]


@pytest.mark.parametrize(("looks", "counts"), [(1, False), (2, False), (3, True)])
def test_patience(looks: int, counts: bool) -> None:
    """What comes late counts from its third look on."""
    found: list[list[Issue]] = [[]] * (6 - looks) + [[COLLAPSE]] * looks
    assert keys(followed(found, [1.0] * 24)) == ["ATTN_ENTROPY_COLLAPSE"] * counts


def test_what_was_always_there_counts_though_the_loss_falls() -> None:
    """A state that learning has not brought about is none that it can be thanked for."""
    assert keys(followed([[COLLAPSE]] * 6, [1.0 / step for step in range(1, 25)])) == ["ATTN_ENTROPY_COLLAPSE"]


def test_what_came_with_learning_is_no_fault() -> None:
    """Attention that gets sharp while the loss halves has learned where to look."""
    assert keys(followed([[]] * 3 + [[COLLAPSE]] * 3, [1.0 / step for step in range(1, 25)])) == []


@pytest.mark.parametrize(("value", "counts"), [(0.05, False), (0.001, True)])
def test_what_came_at_once_is_not_of_the_learning(value: float, counts: bool) -> None:
    """Between two looks a few steps apart training takes attention to its limit, and not to a hundredth of it."""
    sharp = COLLAPSE.model_copy(update={"value": value, "threshold": 0.1})
    found = followed([[]] * 3 + [[sharp]] * 3, [1.0 / step for step in range(1, 25)])
    assert keys(found) == ["ATTN_ENTROPY_COLLAPSE"] * counts
    again = LastingIssues()
    again.load_state_dict(json.loads(json.dumps(found.state_dict())))
    assert keys(again) == ["ATTN_ENTROPY_COLLAPSE"] * counts


def test_what_came_with_learning_is_no_fault_for_good() -> None:
    """The verdict stays when the losses from which it followed are so long ago that they are not kept."""
    losses = [1.0 / step for step in range(1, 1501)]
    assert keys(followed([[]] * 3 + [[COLLAPSE]] * 372, losses)) == []


def test_what_came_with_harm_counts_for_good() -> None:
    """So it does where the loss rose when it came, however low it is long after that."""
    losses = [1.0] * 5 + [0.1] * 95 + [0.3] * 50 + [0.1] * 1350
    assert keys(followed([[]] * 25 + [[COLLAPSE]] * 350, losses)) == ["ATTN_ENTROPY_COLLAPSE"]


def test_what_came_with_harm_counts_though_the_loss_was_low() -> None:
    """The same is a fault where the loss went up when it came."""
    losses = [1.0] * 5 + [0.1] * 7 + [0.3] * 12
    assert keys(followed([[]] * 3 + [[COLLAPSE]] * 3, losses)) == ["ATTN_ENTROPY_COLLAPSE"]


def test_what_went_by_is_forgotten() -> None:
    """A state that is over is not told of."""
    assert keys(followed([[COLLAPSE]] * 5 + [[]], [1.0] * 24)) == []


def test_what_cannot_be_waited_for_counts_at_once() -> None:
    """Numbers that are not finite, and thresholds that the user chose, need neither patience nor a reason."""
    lasting = followed([[]] * 5 + [[COLLAPSE, BROKEN]], [1.0 / step for step in range(1, 25)])
    assert keys(lasting) == ["NUMERICAL"]
    assert lasting.issues(firm={IssueType.ATTN_ENTROPY_COLLAPSE}) == [COLLAPSE, BROKEN]


def test_state_continues() -> None:
    """A checkpoint keeps the count and the step at which the issue was not there yet."""
    lasting = followed([[]] * 3 + [[COLLAPSE]] * 2, [1.0] * 24)
    series, other = Series(), LastingIssues()
    for _ in range(24):
        series.append(0.0, 1.0, (), finite=True)
    other.load_state_dict(json.loads(json.dumps(lasting.state_dict())))
    other.add([COLLAPSE], 24, series)
    assert keys(other) == ["ATTN_ENTROPY_COLLAPSE"]
