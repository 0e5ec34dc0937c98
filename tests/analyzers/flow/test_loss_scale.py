"""The diagnosis of a run does not depend on the scale of its loss."""

from __future__ import annotations

import pytest

from benchmarks.diagnosis import scenarios
from benchmarks.diagnosis.driver import diagnose

NAMES = list(scenarios.load())
SOME, MORE = NAMES[::120], NAMES[1::30]
SCALES = (2.0**-13, 2.0**13)


def check(name: str) -> None:
    """Compare the issues of a run, and their order, at every scale."""
    scenario = scenarios.load()[name]
    if not scenario.build().scalable:
        pytest.skip("the scale of its loss is real, as under a fixed clipping threshold or in float16")
    plain = [issue.key for issue in diagnose(scenario)]
    for scale in SCALES:
        assert [issue.key for issue in diagnose(scenario, scale)] == plain


@pytest.mark.parametrize("name", SOME)
def test_scale_changes_nothing(name: str) -> None:
    """A run of every kind is judged the same with its loss multiplied by 2^-13, 1 and 2^13."""
    check(name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in MORE else pytest.mark.exhaustive)
        for name in NAMES
        if name not in SOME
    ],
)
def test_scale_changes_nothing_in_any_run(name: str) -> None:
    """Every run is judged the same at every scale."""
    check(name)
