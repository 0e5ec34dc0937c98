"""Which charts a run has, and how large they may be."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from gradtrack.pages.charts import charts_of, to_plain
from gradtrack.records import Panel
from gradtrack.reports.panels import panels_of
from tests.pages.runs import gather, issue, row


def plain(*rows: Any) -> dict[str, dict[str, Any]]:
    """Return the charts of a run by title."""
    return {chart["title"]: chart for chart in to_plain(charts_of(gather(*rows)))}


def test_values_that_hardly_differ_are_told_apart() -> None:
    """A line has as many digits as it takes to see its shape, and no more."""
    metrics = [{"rnn/spectral_radius": 0.9998 + 1e-6 * step} for step in range(3)]
    charts = plain(*(row(1 + step, metrics=found) for step, found in enumerate(metrics)))
    assert charts["Spectral radius"]["lines"][0]["y"] == [0.9998, 0.999801, 0.999802]


@pytest.mark.parametrize("count", [3, 2000])
def test_the_largest_numbers_stay_numbers(count: int) -> None:
    """Neither rounding up nor the middle of two of them makes one infinite."""
    rows = [row(step, metrics={"rnn/spectral_radius": 1.7975e308 - step % 2 * 1e303}) for step in range(1, count + 1)]
    (line,) = plain(*rows)["Spectral radius"]["lines"]
    assert line["bad"] == []
    assert all(1.797e308 <= value < math.inf for value in line["y"])


def test_a_step_that_was_left_out_has_no_clip_coefficient() -> None:
    """The coefficient of a skipped step says nothing about the gradients."""
    rows = [{"train/grad_clip_coef": 0.5, "train/grad_skipped": skipped} for skipped in (0.0, 1.0, 0.0)]
    charts = plain(*(row(1 + step, metrics=found) for step, found in enumerate(rows)))
    assert charts["Clipping"]["lines"][0]["x"] == [1, 3]


def test_charts_say_what_their_metrics_mean() -> None:
    """One sentence, or one for each line, stands below; a metric without a description is shown without."""
    metrics = {"gain/mean": 1.0, "rl/entropy_level": 0.5, "rnn/gates/forget/lstm": 0.5, "rnn/gates/input/lstm": 0.5}
    panel = Panel(title="Gains", section="gain", metrics=("gain/mean", "gain/max"))
    charts = plain(row(1, metrics=metrics | {"gain/max": 2.0, "mine/own": 1.0}, panels=(panel,)))
    assert charts["Gains"]["about"] == (
        "mean: Mean gain of the transitions from each block to the one before. max: The largest gain of a transition."
    )
    assert charts["Entropy level"]["about"].endswith("newest quarter (share).")
    assert charts["Gates"]["about"] == "Mean opening of one gate (share)."
    assert charts["Own"]["about"] == ""


def test_training_has_its_charts_with_every_row() -> None:
    """Loss, norms, clipping, variance, range and groups are drawn as recorded."""
    charts = plain(row(1), row(2, norm=4.0))
    assert [line["y"] for line in charts["Gradient norm"]["lines"]] == [[2.0, 4.0], [1.0, 1.0], [1.0, 1.0]]
    assert charts["Gradient norm"]["log"]
    assert charts["Loss"]["lines"][0]["y"] == [1.0, 0.5]
    assert charts["Range"]["lines"][1] == {
        "name": "|min|",
        "style": "solid",
        "x": [1, 2],
        "y": [0.6667, 1.333],
        "bad": [],
    }
    assert [line["name"] for line in charts["Gradient norm of each group"]["lines"]] == ["W_in", "W_out"]
    assert {"Clipping", "Variance"} <= set(charts)


def test_charts_without_a_number_are_left_out() -> None:
    """A chart with nothing to draw is no chart."""
    assert set(plain(row(1, loss=None, metrics={"train/grad_norm": 1.0}))) == {"Gradient norm"}


def test_infinite_values_are_marks_and_not_numbers() -> None:
    """JSON has no infinity, and a scale has no place for it: its step is marked."""
    line = plain(row(1), row(2, norm=math.inf), row(3, norm=math.nan))["Gradient norm"]["lines"][0]
    assert (line["x"], line["bad"], line["lost"]) == ([1], [2], [3])


def test_a_gap_is_no_nan() -> None:
    """A step that has no norm is not marked as one whose norm is not a number, and many marks are thinned out."""
    (line, *_) = plain(row(1), row(2, metrics={"rnn/radius": 1.0}), row(3))["Gradient norm"]["lines"]
    assert "lost" not in line
    (loss,) = plain(*(row(step, loss=math.nan) for step in range(1, 5001)))["Loss"]["lines"]
    assert (loss["lost"][0], loss["lost"][-1], len(loss["lost"])) == (1, 5000, 60)


def test_what_no_panel_names_is_gathered_by_its_name() -> None:
    """The same number of several layers is one chart, and one section never fills a page."""
    metrics = {f"attention/diversity/layer{index}": 0.5 for index in range(3)} | {"attention/floor": 0.1}
    charts = plain(row(1, metrics=metrics | {f"many/m{index}": 1.0 for index in range(50)}))
    assert [line["name"] for line in charts["Diversity"]["lines"]] == ["layer0", "layer1", "layer2"]
    assert [line["name"] for line in charts["Floor"]["lines"]] == ["floor"]
    assert len([chart for chart in charts.values() if chart["section"] == "many"]) == 12


def test_events_are_where_issues_opened() -> None:
    """Every chart of a pair knows the steps on which its issues opened, and the number of each issue's card."""
    chart = plain(row(1), row(2, issues=[issue("encoder")]), row(3), row(4, issues=[issue("encoder")]))["Loss"]
    assert chart["events"] == [[2, "EXPLODING:encoder", 1], [4, "EXPLODING:encoder", 1]]


def test_panels_gather_their_metrics_and_the_rest_stand_alone() -> None:
    """A declared panel draws its metrics together, stars included; what no panel names gets a chart of its own."""
    panel = Panel(title="Entropy", section="attention", metrics=("attention/entropy/*",), log_scale=True)
    metrics = {"attention/entropy/0": 0.5, "attention/entropy/1": 0.6, "attention/rank": 3.0}
    charts = plain(row(1, metrics=metrics, panels=(panel,)))
    assert [line["name"] for line in charts["Entropy"]["lines"]] == ["0", "1"]
    assert charts["Entropy"]["section"] == "attention"
    assert charts["Entropy"]["log"]
    assert charts["Rank"]["lines"][0]["y"] == [3.0]


def test_panels_of_the_training_itself_are_not_drawn_twice() -> None:
    """What the charts of the training show needs no panel."""
    panel = Panel(title="Again", section="gradients", metrics=("train/grad_norm",))
    assert "Again" not in plain(row(1, panels=(panel,)))


def test_a_norm_that_is_never_finite_is_not_passed_over() -> None:
    """Where no norm is a number its chart stays, to say so."""
    charts = plain(row(1, norm=math.nan), row(2, norm=math.nan))
    assert charts["Gradient norm"]["lines"][0]["x"] == []


def test_a_loss_that_is_never_finite_is_not_passed_over() -> None:
    """A loss that was infinite throughout has a chart that says so."""
    assert plain(row(1, loss=math.inf), row(2, loss=math.inf))["Loss"]["lines"][0]["bad"] == [1, 2]


def test_one_group_is_not_drawn_beside_the_whole() -> None:
    """The norm of the only group is that of all gradients, which has its chart."""
    assert set(plain(row(1, loss=None, metrics={"train/grad_norm": 1.0, "train/grad_norm/all": 1.0}))) == {
        "Gradient norm"
    }


def test_only_the_strongest_groups_are_drawn() -> None:
    """Many groups would hide each other: the strongest eight come first, then others, in the order of the model."""
    metrics = {f"train/grad_norm/layer{index}": float(index) for index in range(30)}
    (chart,) = plain(row(1, metrics=metrics, loss=None)).values()
    places = [*range(22, 30), *range(6, 22)]
    assert [line["name"] for line in chart["lines"]] == [f"layer{index}" for index in places]
    assert "22 more" in chart["about"]


def test_a_line_without_data_is_not_in_the_legend() -> None:
    """A run without clipping has no curve after it and no threshold."""
    chart = plain(row(1, metrics={"train/grad_norm": 2.0}))["Gradient norm"]
    assert [line["name"] for line in chart["lines"]] == ["before clipping"]


def test_long_runs_become_coarser_and_not_larger() -> None:
    """The size of the data is bounded, and a spike of one step is still in it."""
    rows = [row(step, norm=1e6 if step == 4321 else 1.0) for step in range(1, 10_001)]
    charts = plain(*rows)
    assert len(json.dumps(charts)) < 500_000
    assert max(charts["Gradient norm"]["lines"][0]["high"]) == 1e6
    assert charts["Gradient norm"]["lines"][0]["ends"] == [1, 10_000]
    assert all(len(line["x"]) <= 240 for chart in charts.values() for line in chart["lines"])


def test_each_pair_has_a_section() -> None:
    """A GAN's discriminator and generator do not share their charts."""
    charts = to_plain(charts_of(gather(row(1, source="D"), row(1, source="G"))))
    assert {chart["section"] for chart in charts} == {"Training: D", "Training: G"}


def test_each_pair_has_its_panels() -> None:
    """A panel of a named pair draws that pair's metrics together, and its section tells whose they are."""
    panels = (
        Panel(
            title="Gain", section="flow", metrics=("flow/gain", "flow/low", "flow/high"), kind="band", log_scale=True
        ),
        Panel(title="Ratio", section="flow", metrics=("flow/ratio/*",), kind="multi-line"),
    )
    rows = []
    for source in ("gen", "disc"):
        values = {"flow/gain": 1.0, "flow/low": 0.5, "flow/high": 2.0, "flow/rank": 3.0}
        metrics = {f"{name}/{source}": value for name, value in values.items()}
        metrics |= {f"flow/ratio/{source}/{group}": 0.1 for group in ("W_in", "W_out")}
        rows.append(row(1, source=source, metrics=metrics, panels=panels_of(panels, source)))
    charts = [chart for chart in to_plain(charts_of(gather(*rows))) if chart["title"] != "Loss"]
    found = [(chart["section"], chart["title"], [line["name"] for line in chart["lines"]]) for chart in charts]
    assert found == [
        (f"flow: {source}", title, names)
        for source in ("gen", "disc")
        for title, names in (
            ("Gain", ["gain", "low", "high"]),
            ("Ratio", ["W_in", "W_out"]),
            ("Rank", ["rank"]),
        )
    ]
    assert [chart["log"] for chart in charts] == [True, False, False] * 2
