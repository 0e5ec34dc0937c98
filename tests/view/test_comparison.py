"""Two runs side by side."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from gradtrack.reports import IssueType
from gradtrack.view.charts import Chart
from gradtrack.view.comparison import Comparison
from gradtrack.view.heat import HeatMap
from tests.view.pages import Page
from tests.view.runs import HOSTILE, gather, issue, row


def pair() -> Comparison:
    """Return two runs that differ in everything that is compared."""
    first = gather(row(1), row(2, issues=[issue("old"), issue("both")]), max_grad_norm=1.0)
    metrics = {"train/grad_norm": 4.0, "train/grad_norm/W_in": 0.3, "gain/mean": 2.0}
    second = gather(row(1, metrics={"train/grad_norm": 2.0}), row(3, metrics=metrics, issues=[issue("both")]), seed=3)
    newer = gather(row(4, issues=[issue("new", IssueType.NUMERICAL)]))
    second.issues += newer.issues
    return Comparison(first, second)


def test_issues_appear_and_go() -> None:
    """An issue that only one of the runs had is told; one that both had is not."""
    found = pair()
    assert [issue.key for issue in found.appeared] == ["NUMERICAL:new"]
    assert [issue.key for issue in found.gone] == ["EXPLODING:old"]


def test_settings_that_differ_are_told() -> None:
    """A setting that one run left at its default is told as that."""
    assert pair().settings() == [("max_grad_norm", "1.0", "default"), ("seed", "default", "3")]


def test_last_values_have_their_ratio() -> None:
    """Groups and analyzers that both runs have are compared by their last value."""
    assert pair().last_values() == [("norm/W_in", "1.2", "0.3", "0.25")]


def test_curves_of_both_are_in_one_chart() -> None:
    """Every chart has a line for each run."""
    chart = next(chart for chart in pair().charts() if chart.title == "Gradient norm")
    assert isinstance(chart, Chart)
    assert [(line.name, line.values.tolist()) for line in chart.lines] == [("A", [2.0, 2.0]), ("B", [2.0, 4.0])]


def test_comparison_is_shown_as_text_page_and_data(tmp_path: Path) -> None:
    """The three forms tell the same."""
    found = pair()
    console = Console(file=io.StringIO(), width=100)
    console.print(found.show())
    assert isinstance(console.file, io.StringIO)
    page = Page(found.write_html(tmp_path / "diff.html").read_text(encoding="utf-8"))
    for text in (console.file.getvalue(), page.text, json.dumps(found.to_plain())):
        assert "NUMERICAL" in text
        assert "max_grad_norm" in text
        assert "0.3" in text
    assert "appeared in B" in page.text
    assert len(page.chart("Gradient norm")["lines"]) == 2
    assert [line for line in console.file.getvalue().splitlines() if line.startswith("gradient norm") and "▁" in line]


def test_groups_of_both_are_seen_over_depth() -> None:
    """Runs of different architectures have their groups side by side, each in a picture of its own."""
    runs = []
    for names in (("a", "b", "c"), ("x", "y", "z", "end")):
        norms = {f"train/grad_norm/{name}": 0.5 for name in names}
        runs.append(gather(*(row(step, metrics=norms) for step in range(1, 5))))
    heat = {chart.title: chart for chart in Comparison(*runs).charts() if isinstance(chart, HeatMap)}
    assert list(heat["A: gradient norm over depth and time"].rows) == ["a", "b", "c"]
    assert list(heat["B: gradient norm over depth and time"].rows) == ["x", "y", "z", "end"]


def test_hostile_names_are_text(tmp_path: Path) -> None:
    """The page of a comparison escapes as that of a run does."""
    run = gather(row(1, issues=[issue(HOSTILE)], metrics={f"train/grad_norm/{HOSTILE}": 1.0}))
    page = Page(Comparison(gather(row(1)), run).write_html(tmp_path / "diff.html").read_text(encoding="utf-8"))
    assert [tag for tag, _ in page.tags].count("script") == 2


def test_runs_without_a_common_pair_are_compared_as_far_as_possible() -> None:
    """Runs of different models still have steps, settings and issues."""
    found = Comparison(gather(row(1)), gather(row(1, source="G")))
    assert found.charts() == []
    assert ("steps", "1", "1") in found.numbers()
