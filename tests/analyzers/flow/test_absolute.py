"""What a threshold on the coefficient of variation can see at all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.analyzers.base import Series
from gradtrack.analyzers.flow.samples import Case, ParameterSample, Sample
from gradtrack.analyzers.flow.verdict import Thresholds, judge_absolutely
from gradtrack.reports import Issue


def judged(norms: list[float], limit: float) -> list[Issue]:
    """Judge the norms of one parameter over a window by a limit on their variation."""
    params = [ParameterSample(norm=norm, weight=1.0, ndim=2, count=4, owned=True, has_grad=True) for norm in norms]
    samples = [Sample(step=step, nodes=[], params={"w": param}) for step, param in enumerate(params)]
    return judge_absolutely(Case(Series(), samples), Thresholds(unstable_cv=limit))


@given(st.integers(2, 60), st.data())
def test_spikes_vary_by_no_more_than_their_number_allows(count: int, data: st.DataObject) -> None:
    """F6: k equal spikes among n norms vary by sqrt((n - k)/k) at most, which is reached where the rest is zero."""
    spikes = data.draw(st.integers(1, count - 1))
    bound = math.sqrt((count - spikes) / spikes)
    (issue,) = judged([1.0] * spikes + [0.0] * (count - spikes), bound / 2)
    assert issue.value == pytest.approx(bound, abs=1e-9)
    rest = data.draw(st.floats(0, 1))
    assert judged([1.0] * spikes + [rest] * (count - spikes), bound * (1 + 1e-12)) == []


@pytest.mark.parametrize(("spike", "seen"), [(45.0, False), (45.4, True)])
def test_the_usual_limit_needs_one_enormous_spike(spike: float, seen: bool) -> None:
    """F6: over 20 steps a variation of 3 takes one norm of 45 times the others; alternation has 1 at the most."""
    assert bool(judged([spike] + [1.0] * 19, 3.0)) is seen
    assert judged([1.0, 1e6] * 10, 1.0) == []
