"""The diagnosis of a run does not depend on the scale of its loss."""

from __future__ import annotations

import pytest

from benchmarks.diagnosis import scenarios
from benchmarks.diagnosis.driver import diagnose

NAMES = [name for name, scenario in scenarios.load().items() if scenario.build().scalable]
SOME = NAMES[::40]
MORE = NAMES[1::4]
SCALES = (2.0**-13, 2.0**13)


def identical(name: str) -> bool:
    """Whether a run gets the same issues, in the same order, at every scale."""
    scenario = scenarios.load()[name]
    plain = [issue.key for issue in diagnose(scenario)]
    return all([issue.key for issue in diagnose(scenario, scale)] == plain for scale in SCALES)


@pytest.mark.parametrize("name", SOME)
def test_scale_changes_nothing(name: str) -> None:
    """A run of every kind is judged the same with its loss multiplied by 2^-13, 1 and 2^13."""
    assert identical(name)


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
    assert identical(name)
