"""What notebooks show of reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradtrack import GradientGainMonitor, GradientManager, GradientMonitor
from gradtrack.analyzers.updates import GroupUpdates, UpdatesReport
from gradtrack.reports import GroupStatistics, HealthReport, Issues, StepReport, TrainingSummary, html
from tests.pages.pages import Page
from tests.pages.runs import HOSTILE, issue, report, unhealthy
from tests.training import train


def test_step_shows_numbers_issues_and_groups() -> None:
    """A step tells what it was, what was wrong, and how its groups were, with every name as text."""
    group = GroupStatistics(norm=0.125, mean=0.0, variance=0.0, min=0.0, max=0.0, zero_fraction=0.0, element_count=1)
    found = report(7, health=unhealthy(issue(HOSTILE)), groups={HOSTILE: group})
    page = Page(found._repr_html_())
    assert page.texts[0] == "Step 7: unhealthy"
    assert {"gradient norm", "2", "after clipping", "1", HOSTILE, "0.125"} <= set(page.texts)
    assert "Lower the learning rate." in page.text
    assert {tag for tag, _ in page.tags} <= {"div", "strong", "table", "thead", "tbody", "tr", "td", "th", "ul", "li"}


def test_a_step_that_was_not_measured_shows_what_is_known() -> None:
    """An unknown number is a dash."""
    assert "–" in Page(StepReport(step=1)._repr_html_()).texts


def test_health_is_a_word_and_its_issues() -> None:
    """A healthy report is one word."""
    assert Page(HealthReport()._repr_html_()).texts == ["healthy"]
    assert "EXPLODING at layer" in Page(unhealthy(issue("layer"))._repr_html_()).text


def test_summary_shows_the_training() -> None:
    """The sums of a training are told with their units."""
    page = Page(
        TrainingSummary.model_validate({"total_steps": 9, "health_issues": {"issues": {"DEAD": 3}}})._repr_html_()
    )
    assert page.texts[0] == "9 steps"
    assert {"DEAD", "open on 3 steps"} <= set(page.texts)


def test_one_step_is_one_step() -> None:
    """A count of one has no plural."""
    page = Page(
        TrainingSummary.model_validate({"total_steps": 1, "health_issues": {"unhealthy_steps": 1}})._repr_html_()
    )
    assert page.texts[0] == "1 step"
    assert "1 steps" not in page.text


def test_numbers_stand_below_each_other() -> None:
    """In a table with a head the cells and heads of numbers stand on the right, those of names on the left."""
    page = Page(html.grid(("name", "norm"), [("head", 0.5), ("tail", 12.0)]))
    sides = [str(attributes.get("style")) for tag, attributes in page.tags if tag in ("th", "td")]
    assert sides == ["text-align: left", "text-align: right"] * 3


def test_a_step_without_a_finite_gradient_shows_no_statistics() -> None:
    """Where every element was NaN, a norm of nothing is no zero: neither in a report nor in its manager's monitor."""
    model = torch.nn.Linear(2, 1)
    manager = GradientManager()
    report = manager.step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nan * model(torch.ones(1, 2)).sum())
    texts = Page(report._repr_html_()).texts
    assert texts.count("–") >= 6
    assert "0" not in Page(manager.monitor._repr_html_()).texts
    assert "1 step" in Page(manager._repr_html_()).text


def test_monitor_shows_its_last_steps() -> None:
    """A monitor shows the statistics that it took in last."""
    monitor = GradientMonitor()
    monitor.update_statistics([torch.tensor([3.0, 4.0])])
    page = Page(monitor._repr_html_())
    assert {"total_norm", "5", "3.5"} <= set(page.texts)


def test_a_report_of_an_analyzer_shows_its_numbers_and_its_parts() -> None:
    """What has no display of its own shows its plain fields, and a table of the reports within it."""
    parts = {HOSTILE: GroupUpdates(ratio=0.125, num_elements=7)}
    page = Page(UpdatesReport(step=4, ratio=0.25, groups=parts)._repr_html_())
    assert page.texts[0] == "UpdatesReport"
    assert {"ratio", "0.25", HOSTILE, "0.125", "7"} <= set(page.texts)


def test_what_prints_well_is_shown_as_it_prints() -> None:
    """A report or a monitor that writes itself for a person looks the same in a notebook."""
    assert "EXPLODING at layer" in Page(issue("layer")._repr_html_()).text
    blocks = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with GradientGainMonitor(blocks) as monitor:
        torch.autograd.backward(blocks(torch.ones(2, 3)).sum())
    assert Page(monitor._repr_html_()).texts == [monitor.report()]


def test_a_step_is_printed_in_a_line() -> None:
    """Its numbers, its health with a line for each issue, and its notes."""
    found = report(7, health=unhealthy(issue("layer")), notes=["by the way"])
    first, fault, note = str(found).splitlines()
    assert first == "step 7: loss 0.142857, gradient norm 2 -> 1, unhealthy"
    assert "EXPLODING at layer" in fault
    assert note == "  note: by the way"
    assert str(StepReport(step=1, source="critic")).startswith("step 1 of critic: loss unknown, ")


def test_a_list_of_issues_shows_a_line_for_each() -> None:
    """In a terminal and in a notebook; an empty one is that of Python."""
    found = Issues([issue("first"), issue("second")])
    assert [line.split(":")[0] for line in str(found).splitlines()] == [
        "[HIGH] EXPLODING at first",
        "[HIGH] EXPLODING at second",
    ]
    assert repr(found) == str(found)
    assert Page(found._repr_html_()).texts[0] == "2 issues"
    assert repr(Issues()) == "[]"
    assert isinstance(GradientManager(backends=[]).diagnose(), Issues)


def test_a_manager_says_what_it_is() -> None:
    """Its steps and what it keeps, open or closed."""
    with GradientManager(backends=["memory"]) as manager:
        train(manager, 3)
        assert repr(manager) == "<GradientManager: steps 3; keeps memory>"
    assert repr(manager) == "<GradientManager (closed): steps 3; keeps memory>"
    assert str(manager.get_training_summary()).splitlines()[0] == "3 steps"
    assert repr(GradientManager(backends=[])) == "<GradientManager: steps 0; keeps nothing>"


def test_a_notebook_shows_a_plot(tmp_path: Path) -> None:
    """What a plot returns is its path, and displays as the picture."""
    pytest.importorskip("matplotlib")
    manager = GradientManager(backends=[])
    train(manager, 3)
    found: Any = manager.plot_training_curves(tmp_path / "curves.png")
    assert found == tmp_path / "curves.png"
    assert found._repr_png_().startswith(b"\x89PNG")
    drawn: Any = manager.plot_training_curves(tmp_path / "curves.svg")
    assert "<svg" in drawn._repr_svg_()
    assert drawn._repr_png_() is None
    assert found.parent._repr_png_() is None


def test_both_names_of_a_norm() -> None:
    """All gradients and a group of them have it as `norm` and as `total_norm`, as an attribute and as a key."""
    manager = GradientManager(backends=[])
    last = train(manager, 1)[0]
    assert last.statistics is not None
    both: list[Any] = [last.statistics, *last.groups.values()]
    for found in both:
        assert found.norm == found.total_norm == found["norm"] == found["total_norm"] == found.get("norm")
        assert "norm" in found
        assert len({"norm", "total_norm"} & found.keys()) == 1
