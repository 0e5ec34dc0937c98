"""The rows of a pair as columns."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradtrack.pages.run_data import LOSS
from gradtrack.records import Panel
from tests.pages.runs import gather, row


def test_rows_become_columns_in_which_gaps_are_nan() -> None:
    """A metric that a row lacks is NaN there, whether it came late or went early."""
    (track,) = gather(row(1), row(2, metrics={"rnn/radius": 0.9}), row(3)).tracks.values()
    assert track.steps.tolist() == [1, 2, 3]
    assert track.loss.tolist() == [1.0, 0.5, 1 / 3]
    assert np.array_equal(track.column("train/grad_norm"), [2.0, math.nan, 2.0], equal_nan=True)
    assert np.array_equal(track.column("rnn/radius"), [math.nan, 0.9, math.nan], equal_nan=True)
    assert np.isnan(track.column("unheard/of")).all()
    assert track.last("rnn/radius") == 0.9
    assert track.groups == ["W_in", "W_out"]


def test_what_was_last_recorded_may_be_no_number() -> None:
    """A NaN at the end is told from a row that lacks the metric, and a metric that never was from both."""
    metrics = [{"a/nan": 1.0, "a/gap": 1.0, "a/inf": 1.0}, {"a/nan": math.nan, "a/inf": -math.inf}]
    (track,) = gather(*(row(step, metrics=found) for step, found in enumerate(metrics, 1))).tracks.values()
    assert math.isnan(track.last("a/nan") or 0.0)
    assert (track.last("a/gap"), track.last("a/inf"), track.last("a/none")) == (1.0, -math.inf, None)


@pytest.mark.parametrize(
    ("losses", "last"),
    [((1.0, math.nan), "nan"), ((math.nan, 1.0), "1.0"), ((1.0, None), "1.0"), ((None, None), "None")],
)
def test_a_loss_of_nan_is_told_from_none(losses: tuple[float | None, ...], last: str) -> None:
    """The last loss is what was recorded last."""
    (track,) = gather(*(row(step, loss=loss) for step, loss in enumerate(losses, 1))).tracks.values()
    assert str(track.last(LOSS)) == last


def test_a_nan_that_was_replaced_is_gone() -> None:
    """A resumed run that repeats a step repeats what it recorded."""
    bad, good, late = row(2, norm=math.nan, loss=math.nan), row(2, norm=3.0), row(3, metrics={}, loss=None)
    (track,) = gather(row(1), bad, good, late).tracks.values()
    assert (track.last("train/grad_norm"), track.last(LOSS)) == (3.0, 0.5)


def test_a_step_that_was_recorded_twice_is_one_row() -> None:
    """What is known late joins its step, and what a resumed run repeats replaces what was there."""
    late = row(1, metrics={"updates/ratio": 0.25}, loss=None)
    (track,) = gather(row(1), row(3), late, row(2), row(3, norm=9.0)).tracks.values()
    assert track.steps.tolist() == [1, 2, 3]
    assert track.column("train/grad_norm").tolist() == [2.0, 2.0, 9.0]
    assert track.column("updates/ratio")[0] == 0.25
    assert track.loss[0] == 1.0


def test_pairs_have_tracks_with_the_same_names() -> None:
    """The name of a pair is taken out of its metrics, those of its groups too."""
    tracks = gather(row(1, source="D"), row(1, source="G", norm=5.0)).tracks
    assert list(tracks) == ["D", "G"]
    assert tracks["G"].last("train/grad_norm") == 5.0
    assert tracks["G"].groups == ["W_in", "W_out"]
    assert tracks["D"].last("train/grad_norm/W_out") == pytest.approx(1.6)


def test_a_step_without_a_finite_gradient_has_no_norm() -> None:
    """A norm over no element at all is not a zero; one of a gradient that vanished is."""
    metrics = [{"train/grad_norm/head": norm, "train/grad_mean/head": mean} for norm, mean in
               ((1.0, 0.1), (0.0, math.nan), (0.0, 0.0), (0.0, math.nan))]  # fmt: skip
    (track,) = gather(*(row(step, metrics=found) for step, found in enumerate(metrics, 1))).tracks.values()
    assert np.array_equal(track.over_finite("train/grad_norm/head"), [1.0, math.nan, 0.0, math.nan], equal_nan=True)
    assert track.last_number("train/grad_norm/head")[0] == 0.0
    assert math.isnan(track.last("train/grad_norm/head") or 0.0)


def test_panels_are_gathered_from_the_rows() -> None:
    """A panel that a row declares belongs to the pair of the row."""
    panel = Panel(title="Radius", section="rnn", metrics=("rnn/radius",))
    assert gather(row(1), row(2, panels=(panel,)), row(3, panels=(panel,))).tracks[""].panels == (panel,)
