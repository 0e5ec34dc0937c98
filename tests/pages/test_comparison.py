"""Two runs side by side."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradtrack.pages.charts import Chart
from gradtrack.pages.comparison import Comparison
from gradtrack.pages.heat_map import HeatMap
from gradtrack.reports import IssueType
from tests.pages.pages import Page
from tests.pages.runs import HOSTILE, gather, issue, row


def pair() -> Comparison:
    """Return two runs that differ in everything that is compared."""
    first = gather(row(1), row(2, issues=[issue("old"), issue("both")]), max_grad_norm=1.0)
    metrics = {"train/grad_norm": 4.0, "train/grad_norm/W_in": 0.3, "gain/mean": 2.0}
    second = gather(row(1, metrics={"train/grad_norm": 2.0}), row(3, metrics=metrics, issues=[issue("both")]), seed=3)
    newer = gather(row(4, issues=[issue("new", IssueType.NUMERICAL)]))
    second.episodes += newer.episodes
    return Comparison(first, second)


def test_issues_appear_and_go() -> None:
    """An issue that only one of the runs had is told; one that both had is not."""
    found = pair()
    assert [issue.key for issue in found.appeared] == ["NUMERICAL:new"]
    assert [issue.key for issue in found.gone] == ["EXPLODING:old"]


def test_gains_of_two_architectures_are_laid_over_each_other() -> None:
    """What an analyzer says about the whole model of both runs is a chart; what only one of them has is none."""
    gains = [{"gain/mean": 0.9 + run, "gain/jump": 0.0, f"gain/mean/block{run}": 1.0} for run in (0, 1)]
    charts = Comparison(*(gather(row(1, metrics=found)) for found in gains)).charts()
    shown = {chart.title: chart for chart in charts if isinstance(chart, Chart) and chart.section == "gain"}
    assert list(shown) == ["Mean", "Jump"]
    assert [(line.name, list(line.values)) for line in shown["Mean"].lines] == [("A", [0.9]), ("B", [1.9])]


def test_pairs_that_only_one_run_has_are_named() -> None:
    """Nothing is left out in silence where two runs have no pair of the same name."""
    found = Comparison(gather(row(1)), gather(row(1, source="generator"), row(1, source="critic")))
    told = "no pair of the other run has this name: the unnamed pair in A; critic, generator in B."
    assert told in " ".join(shown(found).split())
    assert Comparison(gather(row(1)), gather(row(1))).unmatched == ""


def test_settings_that_differ_are_told() -> None:
    """A setting that one run left at its default is told as that."""
    assert pair().settings() == [("max_grad_norm", "1.0", "default"), ("seed", "default", "3")]


def shown(found: Comparison, width: int = 100) -> str:
    """Return what a console prints."""
    console = Console(file=io.StringIO(), width=width)
    console.print(found.show())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_last_values_have_their_ratio() -> None:
    """Groups and analyzers are compared by their last value; what one of the runs does not have is a dash."""
    assert pair().last_values() == [("norm/W_in", 1.2, 0.3), ("norm/W_out", 1.6, None), ("gain/mean", None, 2.0)]
    lines = [line.split() for line in shown(pair()).splitlines()]
    assert ["norm/W_in", "1.2", "0.3", "0.25"] in lines
    assert ["norm/W_out", "1.6", "–", "–"] in lines


def test_a_run_that_ends_without_a_number_says_so(tmp_path: Path) -> None:
    """The last loss and norm of a run that broke are what it ended with, as text, on the page and as data."""
    metrics = {"train/grad_norm/W_in": 0.0, "train/grad_mean/W_in": math.nan}
    found = Comparison(gather(row(1)), gather(row(1), row(2, loss=math.nan, metrics=metrics)))
    assert ["last", "loss", "1", "nan"] in [line.split() for line in shown(found).splitlines()]
    assert ["norm/W_in", "1.2", "nan", "–"] in [line.split() for line in shown(found).splitlines()]
    plain = json.loads(json.dumps(found.to_plain(), allow_nan=False))
    assert (plain["numbers"]["last loss"], plain["last"]["norm/W_in"]) == ([1.0, "NaN"], [1.2, "NaN"])
    assert plain["numbers"]["skipped steps"] == [None, None]
    assert " nan " in Page(found.write_html(tmp_path / "diff.html").read_text(encoding="utf-8")).text


def test_hostile_names_stay_on_their_line_and_out_of_the_terminal() -> None:
    """No name breaks a table, turns the line round or sends a command."""
    names = ["\x1b[2Jred\r\nlayer", "\u202egnp.exe", HOSTILE, "[red]x[/]", "y" * 500]
    metrics = {f"train/grad_norm/{name}": 1.0 for name in names}
    settings: dict[str, Any] = {names[0]: names[1]}
    run = gather(row(1, metrics=metrics, issues=[issue(name) for name in names]), **settings)
    for width in (50, 80, 120):
        text = shown(Comparison(gather(row(1)), run), width)
        assert not [letter for letter in text if not letter.isprintable() and letter != "\n"]
        assert max(map(len, text.splitlines())) <= width
        assert "[red]x[/]" in text


def test_page_begins_with_what_differs(tmp_path: Path) -> None:
    """The numbers of both runs stand above the curves, under the names of their directories."""
    first, second = (gather(row(1), directory=tmp_path / name) for name in ("before", "after"))
    text = Page(Comparison(first, second).write_html(tmp_path / "diff.html").read_text(encoding="utf-8")).text
    assert "before and after" in text
    assert text.index("1 → 1") < text.index("Issues")


def test_many_groups_leave_those_that_changed_most() -> None:
    """A terminal gets as many as a person reads, and the number of the others."""
    norms = [{f"train/grad_norm/layer{index}": 1.0 for index in range(300)} for _ in range(2)]
    norms[1] |= {"train/grad_norm/layer7": 90.0, "train/grad_norm/layer200": math.nan}
    text = shown(Comparison(*(gather(row(1, metrics=one)) for one in norms)))
    assert "norm/layer7 " in text
    assert "norm/layer200 " in text
    assert "and 260 that changed less" in text


def test_curves_of_both_are_in_one_chart() -> None:
    """Every chart has a line for each run."""
    chart = next(chart for chart in pair().charts() if chart.title == "Gradient norm")
    assert isinstance(chart, Chart)
    assert [(line.name, line.values.tolist()) for line in chart.lines] == [("A", [2.0, 2.0]), ("B", [2.0, 4.0])]


def test_issues_are_marked_on_the_curves(tmp_path: Path) -> None:
    """Where an issue opened that only one of the runs has, the curves of both have the number of its card."""
    healthy = {f"train/grad_norm/{name}": 0.5 for name in "abc"}
    first = gather(*(row(step, metrics=healthy, issues=[issue("both")]) for step in range(1, 5)))
    sick = [issue("both"), issue("new", IssueType.NUMERICAL)]
    second = gather(*(row(step, metrics=healthy, issues=sick[: 1 + (step == 3)]) for step in range(1, 5)))
    page = Page(Comparison(first, second).write_html(tmp_path / "diff.html").read_text(encoding="utf-8"))
    assert page.chart("Loss")["events"] == [[3, "NUMERICAL:new in B", 1]]
    assert page.chart("Norm of a")["events"] == [[3, "NUMERICAL:new in B", 1]]
    assert page.chart("B: gradient norm over depth and time")["events"] == [[3, "NUMERICAL:new in B", 1]]
    assert page.chart("A: gradient norm over depth and time")["events"] == []
    assert [attributes["id"] for tag, attributes in page.tags if tag == "article"] == ["issue1"]
    back = Comparison(second, first).charts()[0]
    assert isinstance(back, Chart)
    assert back.events == [(3, "NUMERICAL:new in A", 1)]


def test_shares_are_per_cent() -> None:
    """A clip rate reads as in the report of a run."""
    lines = [line.split() for line in shown(Comparison(gather(row(1)), gather(row(1, metrics={})))).splitlines()]
    assert ["clip", "rate,", "median", "50.0%", "–"] in lines


def test_comparison_is_shown_as_text_page_and_data(tmp_path: Path) -> None:
    """The three forms tell the same."""
    found = pair()
    text = shown(found)
    page = Page(found.write_html(tmp_path / "diff.html").read_text(encoding="utf-8"))
    for form in (text, page.text, json.dumps(found.to_plain())):
        assert "NUMERICAL" in form
        assert "max_grad_norm" in form
        assert "0.3" in form
    assert "appeared in B" in page.text
    assert len(page.chart("Gradient norm")["lines"]) == 2
    assert [line for line in text.splitlines() if line.startswith("gradient norm") and "▁" in line]


def test_groups_of_both_are_seen_over_depth() -> None:
    """Runs of different architectures have their groups side by side, each in a picture of its own."""
    runs = []
    for names in (("a", "b", "c"), ("x", "y", "z", "end")):
        norms = {f"train/grad_norm/{name}": 0.5 for name in names}
        runs.append(gather(*(row(step, metrics=norms) for step in range(1, 5))))
    heat = {chart.title: chart for chart in Comparison(*runs).charts() if isinstance(chart, HeatMap)}
    assert list(heat["A: gradient norm over depth and time"].rows) == ["a", "b", "c"]
    assert list(heat["B: gradient norm over depth and time"].rows) == ["x", "y", "z", "end"]


def test_a_colour_means_the_same_in_both_runs() -> None:
    """The pictures over depth share the scale of their colours, whatever a single run fills of it."""
    runs = []
    for norm in (0.1, 1000.0):
        norms = {f"train/grad_norm/{name}": norm for name in "abc"}
        runs.append(gather(*(row(step, metrics=norms | {"train/grad_norm/zero": 0.0}) for step in range(1, 5))))
    heat = [chart for chart in Comparison(*runs).charts() if isinstance(chart, HeatMap)]
    assert [chart.to_plain()["scale"] for chart in heat] == [pytest.approx((-1.0, 3.0))] * 2


def test_hostile_names_are_text(tmp_path: Path) -> None:
    """The page of a comparison escapes as that of a run does."""
    run = gather(row(1, issues=[issue(HOSTILE)], metrics={f"train/grad_norm/{HOSTILE}": 1.0}))
    page = Page(Comparison(gather(row(1)), run).write_html(tmp_path / "diff.html").read_text(encoding="utf-8"))
    assert [tag for tag, _ in page.tags].count("script") == 2


def test_a_sweep_is_a_table_and_curves_on_one_page(tmp_path: Path) -> None:
    """Each of four runs has a line in the tables and in every chart, with the issues that the first has not."""
    norms = (1.0, 0.5, 4.0, math.nan)
    runs = [
        gather(
            row(1, norm=norm),
            row(2, norm=norm, issues=[issue("new")] * (norm == 4.0)),
            directory=tmp_path / f"lr{index}",
            lr=index,
        )
        for index, norm in enumerate(norms)
    ]
    found = Comparison(*runs)
    text = [line.split() for line in shown(found).splitlines()]
    for index, name in enumerate("ABCD"):
        assert [name, str(index)] in text
        assert any(line[:3] == [name, "2", "0.5"] for line in text)
    assert ["C", "HIGH", "EXPLODING:new", "from", "step", "2"] in text
    page = Page(found.write_html(tmp_path / "sweep.html").read_text(encoding="utf-8"))
    lines = page.chart("Gradient norm")["lines"]
    assert [line["name"] for line in lines] == ["A: lr0", "B: lr1", "C: lr2", "D: lr3"]
    assert [line["y"] for line in lines] == [[1.0, 1.0], [0.5, 0.5], [4.0, 4.0], []]
    assert page.chart("Gradient norm")["events"] == [[2, "EXPLODING:new in C", 1]]
    assert "appeared in C" in page.text
    assert "0.5 to 4" in page.text
    told = found.to_plain()
    assert told["settings"] == {"lr": ["0", "1", "2", "3"]}
    assert told["numbers"]["gradient norm, median"] == [1.0, 0.5, 4.0, None]
    assert (len(told["runs"]), told["appeared"]) == (4, ["EXPLODING:new"])


def test_many_runs_have_names_like_columns() -> None:
    """After Z comes AA, and every run has its own name and line."""
    found = Comparison(*(gather(row(1)) for _ in range(30)))
    assert list(found.runs)[25:28] == ["Z", "AA", "AB"]
    chart = found.charts()[0]
    assert isinstance(chart, Chart)
    assert len(chart.lines) == 30


def test_runs_without_a_common_pair_are_compared_as_far_as_possible() -> None:
    """Runs of different models still have steps, settings and issues."""
    found = Comparison(gather(row(1)), gather(row(1, source="G")))
    assert found.charts() == []
    assert ("steps", 1, 1) in found.numbers()
