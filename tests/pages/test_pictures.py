"""The pictures of a training, read back from their figures."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtrack.drawing import figures
from gradtrack.drawing.figures import events_of, mark_events
from gradtrack.errors import MissingExtraError
from gradtrack.pages import pictures
from gradtrack.reports import GradientStatistics, StepReport
from gradtrack.support.names import file_part
from tests.pages.runs import HOSTILE, issue, report, unhealthy
from tests.processes import python

PNG = b"\x89PNG"
GROUP = {"mean": 0.0, "variance": 0.0, "min": 0.0, "max": 0.0, "zero_fraction": 0.0, "element_count": 1}


def statistics(reports: list[StepReport]) -> list[GradientStatistics]:
    """Return the statistics of some reports."""
    return [found.statistics for found in reports if found.statistics is not None]


def line(axes: Any, label: str) -> Any:
    """Return the line of a label."""
    return next(line for line in axes.get_lines() if line.get_label() == label)


def texts(axes: Any) -> list[str]:
    """Return every text inside of an axes."""
    return [text.get_text() for text in axes.texts]


def titles(figure: Any) -> list[str]:
    """Return the titles of the panels."""
    return [title for axes in figure.axes if (title := axes.get_title(loc="left"))]


def test_training_curves_show_loss_norms_counts_and_clipping() -> None:
    """Each of the four panels draws its own quantity, step by step."""
    reports = [report(step, norm=2.0 * step, clipped=1.0, nan_inf={"nan_count": step % 2}) for step in range(1, 6)]
    loss, norms, nonfinite, clipping = pictures.draw_training_curves(reports).axes
    assert line(loss, "loss").get_ydata() == pytest.approx([1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert list(line(norms, "before clipping").get_ydata()) == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert list(line(norms, "after clipping").get_ydata()) == [1.0] * 5
    assert list(line(norms, "threshold").get_ydata()) == [1.0] * 5
    assert list(line(nonfinite, "NaN").get_xdata()) == [1, 3, 5]
    assert list(line(clipping, "share of recent steps clipped").get_ydata()) == [0.5] * 5
    assert list(line(clipping, "clip coefficient").get_ydata()) == [0.5] * 5
    assert norms.get_yscale() == "log"


def test_the_only_kind_of_non_finite_elements_is_named() -> None:
    """Where there is but one, no legend tells whether elements are NaN or infinite: the axis does."""
    axes = {}
    for name in ("nan_count", "inf_count"):
        reports = [report(step, nan_inf={name: step % 2}) for step in range(1, 6)]
        axes[name] = pictures.draw_training_curves(reports).axes[2].get_ylabel()
    assert axes == {"nan_count": "NaN elements", "inf_count": "infinite elements"}


def test_statistics_over_time_mark_where_an_issue_opened() -> None:
    """An issue is a line in every panel, with a text above the upper two."""
    rows = pictures.statistics_over_time([report(step) for step in range(1, 11)])
    figure = pictures.draw_gradient_statistics_over_time(rows, events=[(4, "EXPLODING")])
    assert [texts(axes) for axes in figure.axes] == [["EXPLODING"], ["EXPLODING"], [], []]
    assert all(any(list(one.get_xdata()) == [4, 4] for one in axes.get_lines()) for axes in figure.axes)


def test_training_curves_mark_where_an_issue_opened() -> None:
    """An issue is a line in every panel on the step where it opened, and a text above the loss and the norm."""
    sick = unhealthy(issue("encoder.weight"))
    reports = [report(1), report(2, health=sick), report(3, health=sick), report(4)]
    loss, norms, *others = pictures.draw_training_curves(reports).axes
    for axes in (loss, norms):
        assert texts(axes).count("EXPLODING encoder.weight") == 1
    for axes in (loss, norms, *others):
        assert [mark.get_xdata()[0] for mark in axes.get_lines() if mark.get_linestyle() == ":"] == [2]
    assert events_of(reports) == [(2, "EXPLODING encoder.weight")]


def test_an_issue_that_returns_is_marked_again() -> None:
    """Closing and opening again are two events."""
    sick = unhealthy(issue())
    reports = [report(1, health=sick), report(2), report(3, health=sick)]
    assert [step for step, _ in events_of(reports)] == [1, 3]


def test_events_that_follow_closely_are_told_once() -> None:
    """Issues of the same text share one, with their number; no text lies on a curve."""
    axes = figures.panel(figures.new_figure(), (1, 1, 1), "", "", "")
    figures.log_curve(axes, range(101), [10.0**step for step in range(101)], label="norm", colour="black")
    mark_events(axes, [(10, "a"), (12, "a"), (13, "b"), (15, "a"), (90, "a")])
    assert texts(axes) == ["a ×3", "b", "a"]
    assert axes.get_ylim()[1] > 10.0**110
    assert [text.get_ha() for text in axes.texts] == ["left", "left", "right"]


def test_texts_of_events_never_lie_on_each_other() -> None:
    """What opens together has a row each; where no row is free, the number of the others is told beside them."""
    axes = figures.panel(figures.new_figure(), (1, 1, 1), "", "", "")
    figures.curve(axes, range(101), range(101), label="norm", colour="black")
    mark_events(axes, [(70, f"SATURATION blocks.{index}") for index in range(5)] + [(74, "NUMERICAL"), (5, "a")])
    assert texts(axes) == ["SATURATION blocks.0", "SATURATION blocks.1", "SATURATION blocks.2, 3 more", "a"]
    axes.figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not [1 for index, one in enumerate(boxes) for other in boxes[:index] if one.overlaps(other)]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.7, 1.0])
def test_texts_of_events_stay_inside_of_their_panel(share: float) -> None:
    """However long a name is and wherever its event lies, the text neither leaves the panel nor makes it smaller."""
    axes = figures.panel(figures.new_figure(), (2, 2, 1), "", "", "")
    figures.panel(axes.figure, (2, 2, 2), "", "", "")
    figures.curve(axes, range(101), range(101), label="norm", colour="black")
    axes.figure.draw_without_rendering()
    width = axes.get_window_extent().width
    mark_events(axes, [(100 * share, f"NUMERICAL {'M' * 30}.{index}") for index in range(5)])
    axes.figure.draw_without_rendering()
    assert axes.get_window_extent().width == width
    for text in axes.texts:
        box = text.get_window_extent()
        assert box.x0 >= axes.get_window_extent().x0 - 5
        assert box.x1 <= axes.get_window_extent().x1 + 5


def test_a_loss_that_becomes_nan_is_no_end_of_the_curve() -> None:
    """What was recorded and is not a number is marked, and every panel shows all of the steps."""
    nan = math.nan
    reports = [report(1), report(2), *(report(step, loss=nan, norm=nan, clipped=nan) for step in (3, 4))]
    figure = pictures.draw_training_curves([*reports, report(5, loss=None)])
    loss, norms, *_ = figure.axes
    assert list(line(loss, "not a number").get_xdata()) == [3, 4]
    assert list(line(norms, "not a number").get_xdata()) == [3, 4]
    assert {axes.get_xlim() for axes in figure.axes} == {(0.8, 5.2)}


def test_a_step_that_was_left_out_has_no_clip_coefficient() -> None:
    """The coefficient of a skipped step says nothing about the gradients."""
    *_, clipping = pictures.draw_training_curves([report(1), report(2, skipped=True), report(3)]).axes
    assert np.array_equal(line(clipping, "clip coefficient").get_ydata(), [0.5, math.nan, 0.5], equal_nan=True)


@pytest.mark.parametrize("limits", [(0.08, 0.13), (0.03, 0.7), (0.5, 40.0), (1e-7, 1e3), (1e-90, 1e90), (3.0, 3.1)])
def test_numbers_beside_a_log_axis_can_be_read(limits: tuple[float, float]) -> None:
    """There are at least two of them and never so many that they meet, without a factor of a power of ten."""
    axes = figures.panel(figures.new_figure(), (2, 2, 1), "", "", "")
    figures.log_curve(axes, limits, limits, label="norm", colour="black")
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    figures.tidy(axes.figure).draw_without_rendering()
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        shown = [label for label in labels if label.get_text()]
        assert 2 <= len(shown) <= 8
        assert all(float(label.get_text()) > 0 for label in shown)
        boxes = [label.get_window_extent() for label in shown]
        assert not [1 for one, other in pairwise(boxes) if one.overlaps(other)]


def test_pairs_have_a_line_each() -> None:
    """Several pairs in one manager are several curves, not one that jumps between them."""
    reports = [report(step, norm=norm, source=name) for step in (1, 2, 3) for name, norm in (("g", 1.0), ("d", 5.0))]
    loss, norms, _, clipping = pictures.draw_training_curves(reports).axes
    assert list(line(norms, "before clipping: g").get_ydata()) == [1.0] * 3
    assert list(line(norms, "before clipping: d").get_ydata()) == [5.0] * 3
    assert list(line(loss, "loss: d").get_xdata()) == [1, 2, 3]
    assert list(line(clipping, "clip coefficient: g").get_xdata()) == [1, 2, 3]


def test_steps_without_a_finite_gradient_are_no_zeros() -> None:
    """Where every element was NaN there is no variance to draw, so no zero is drawn either."""
    nothing = {**GROUP, "total_norm": 0.0, "std": 0.0, "element_count": 4, "nan_count": 4, "inf_count": 0}
    rows = pictures.statistics_over_time([report(1), report(2, statistics=nothing, norm=math.nan), report(3)])
    assert rows["step"] == [1, 3]
    assert 0.0 not in rows["grad_variance"]


@pytest.mark.parametrize(
    "norms", [[0.0, 0.0, 0.0], [math.nan, 1.0, math.inf], [None, None, None], [0.0, 1e-300, 1e300]]
)
def test_training_curves_survive_zeros_and_nonfinite_norms(tmp_path: Path, norms: list[float | None]) -> None:
    """Nothing that a norm can be keeps the picture from being written."""
    reports = [report(step, norm=norm) for step, norm in enumerate(norms, 1)]
    assert figures.save(pictures.draw_training_curves(reports), tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_zeros_are_marked_on_a_log_axis() -> None:
    """A zero has no place on a log axis, so it is marked at the lower edge."""
    axes = figures.panel(figures.new_figure(), (1, 1, 1), "", "", "")
    figures.log_curve(axes, [1, 2, 3], [1.0, 0.0, math.inf], label="norm", colour="black")
    assert list(line(axes, "norm: zero").get_xdata()) == [2.0]
    assert list(line(axes, "infinite").get_xdata()) == [3.0]
    assert np.array_equal(line(axes, "norm").get_ydata(), [1.0, math.nan, math.nan], equal_nan=True)


def test_gradient_statistics_show_distribution_spread_extremes_and_correlation() -> None:
    """The four panels show what they are called after."""
    reports = [report(step, norm=float(step)) for step in range(1, 41)]
    figure = pictures.draw_gradient_statistics(statistics(reports))
    distribution, spread, extremes, correlation = figure.axes[:4]
    assert titles(figure) == ["Distribution of norms", "Mean and standard deviation", "Extremes", "Correlation"]
    assert sum(patch.get_height() for patch in distribution.patches) == 40
    assert line(spread, "mean").get_ydata() == pytest.approx([step * 1e-3 * (-1) ** step for step in range(1, 41)])
    assert line(extremes, "|max|").get_ydata() == pytest.approx(np.arange(1, 41) / 2)
    assert line(extremes, "|min|").get_ydata() == pytest.approx(np.arange(1, 41) / 3)
    shown = np.asarray(correlation.images[0].get_array())
    assert shown[0] == pytest.approx([1.0, shown[0, 1], 1.0, -1.0, 1.0])


def test_four_panels_over_time_are_on_log_axes(tmp_path: Path) -> None:
    """Variance, norm, absolute mean and range are drawn on log axes, from the lists of the statistics file."""
    rows = pictures.statistics_over_time([report(step, norm=float(step)) for step in range(1, 11)])
    figure = pictures.draw_gradient_statistics_over_time(json.loads(json.dumps(rows)))
    assert titles(figure) == ["Gradient variance", "Gradient norm", "Absolute gradient mean", "Gradient range"]
    assert [axes.get_yscale() for axes in figure.axes] == ["log"] * 4
    assert line(figure.axes[1], "norm").get_ydata() == pytest.approx(np.arange(1, 11))
    assert line(figure.axes[2], "|mean|").get_ydata() == pytest.approx(np.arange(1, 11) * 1e-3)
    assert line(figure.axes[3], "|min|").get_ydata() == pytest.approx(np.arange(1, 11) / 3)
    assert figures.save(figure, tmp_path / "a" / "b.png").read_bytes().startswith(PNG)


def test_empty_trainings_say_so(tmp_path: Path) -> None:
    """A training without a step makes pictures that tell it."""
    assert texts(pictures.draw_training_curves([]).axes[0]) == ["No steps were recorded."]
    assert texts(pictures.draw_gradient_statistics([]).axes[0]) == ["No steps were recorded."]
    assert figures.save(pictures.draw_gradient_statistics([]), tmp_path / "none.png").exists()


def test_hostile_names_are_drawn_as_text(tmp_path: Path) -> None:
    """A layer may be called anything, also what looks like a formula, without harm to the picture."""
    names = [HOSTILE, "$unclosed", "a_b^c"]
    reports = [report(step, health=unhealthy(issue(name))) for step, name in enumerate(names, 1)]
    assert figures.save(pictures.draw_training_curves(reports), tmp_path / "curves.png").exists()


def test_pictures_leave_the_global_state_alone() -> None:
    """Drawing neither loads pyplot nor keeps a figure open."""
    code = "from gradtrack.pages import pictures; pictures.draw_training_curves([])\nimport sys\n"
    code += "print('matplotlib.pyplot' in sys.modules)"
    found = python("-c", code)
    assert found.stdout.strip() == "False"


def test_missing_matplotlib_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib the error says how to install it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r'pip install "gradtrack\[plots\]"'):
        pictures.draw_training_curves([])


OWN = {"gradient_statistics.png", "gradient_stats.png", "gradient_flow.png"}


def test_pairs_have_pictures_of_their_own(tmp_path: Path) -> None:
    """Pairs share their curves, and each has its statistics and flow in files named after it and no other."""
    reports = [report(step, source=name) for step in (1, 2, 3) for name in ("net/a", "net a", "critic")]
    found = pictures.pictures_of(reports, [])
    pairs = (file_part("net/a"), file_part("net a"), "critic")
    owned = {name.replace(".png", f".{pair}.png") for name in OWN for pair in pairs}
    assert set(found) == {"training_curves.png", *owned}
    assert len(owned) == 3 * len(OWN)
    assert all(draw(tmp_path / name).is_file() for name, draw in found.items())


def test_a_training_without_analyzers_has_the_usual_pictures() -> None:
    """Without analyzers there are the curves, the statistics and the flow."""
    assert set(pictures.pictures_of([report(1)], [])) == {"training_curves.png", *OWN}
