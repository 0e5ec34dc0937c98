"""The norms of all groups over depth and time."""

from __future__ import annotations

import json
import math

import pytest

from gradtrack.pages.heat_map import HeatMap, heat_of
from gradtrack.pages.run_data import Track
from tests.pages.runs import gather, row


def track(num_groups: int, norms: list[float], means: list[float] | None = None) -> Track:
    """Return a run of so many groups that all have these norms."""
    means = means or [0.0] * len(norms)
    names = [f"layer{index}" for index in range(num_groups)]
    rows = []
    for step, (norm, mean) in enumerate(zip(norms, means, strict=True), 1):
        metrics = {f"train/grad_norm/{name}": norm for name in names}
        rows.append(row(step, metrics=metrics | {f"train/grad_mean/{name}": mean for name in names}))
    return gather(*rows).tracks[""]


def heat(found: Track) -> HeatMap:
    """Return the picture, which is there."""
    made = heat_of(found, section="Training", events=[])
    assert made is not None
    return made


def test_a_cell_is_the_logarithm_of_a_norm() -> None:
    """Rows are the groups in the order of the model; a step without a finite gradient has no value."""
    made = heat(track(3, [1.0, 0.01, 0.0, 100.0], [0.1, 0.1, math.nan, 0.1]))
    assert list(made.rows) == ["layer0", "layer1", "layer2"]
    assert list(made.steps) == [1, 2, 3, 4]
    assert made.to_plain()["end"] == 4
    assert list(made.values[0]) == pytest.approx([0.0, -2.0, None, 2.0])


def test_many_groups_and_steps_are_thinned_out() -> None:
    """However large a run is, its picture stays small, tells what it leaves out, and is plain JSON."""
    made = heat(track(200, [1.0] * 1000))
    assert len(json.dumps(made.to_plain(), allow_nan=False)) < 100_000
    assert "Every 3. of 200 groups" in made.about
    assert len(made.rows) == 67
    assert len(made.steps) == 120


def test_a_zero_is_not_left_out() -> None:
    """A gradient that vanished has a value, the lowest there is."""
    assert heat(track(3, [1.0, 0.0, 1.0])).values[0][1] == -99.0


@pytest.mark.parametrize(("groups", "steps"), [(2, 10), (5, 2), (0, 5)])
def test_small_runs_need_no_such_picture(groups: int, steps: int) -> None:
    """Two groups or two steps are told by curves."""
    assert heat_of(track(groups, [1.0] * steps), section="Training", events=[]) is None
