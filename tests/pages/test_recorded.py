"""Recorded steps as reports, and the pictures of a whole run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gradtrack import GradientManager
from gradtrack.pages import pictures
from gradtrack.pages.run_data import recorded_reports
from gradtrack.records import Record
from tests.pages.runs import issue, write_run
from tests.pages.runs import row as pages_row


def row(step: int, size: float, *, source: str = "") -> Record:
    """Make a row with every statistic of the whole."""
    tail = f"/{source}" if source else ""
    metrics = {f"train/grad_{name}{tail}": size for name in ("variance", "norm", "mean", "max", "min")}
    return Record(step=step, time=1.0, metrics=metrics, source=source)


def test_recorded_steps_become_reports(tmp_path: Path) -> None:
    """What the journal has of each pair before a step is a report again, with its issues and its groups."""
    assert recorded_reports(tmp_path, {"": 9}) == ([], {})
    rows = [pages_row(1), pages_row(2, norm=math.inf, issues=[issue("W_in")]), pages_row(3, source="critic")]
    write_run(tmp_path, *rows, pages_row(4), row(5, 1.0))
    found, resumed = recorded_reports(tmp_path, {"": 4, "critic": 9})
    assert resumed == {}
    assert [(one.source, one.step, one.clipping.norm_before) for one in found] == [
        ("", 1, 2.0),
        ("", 2, math.inf),
        ("critic", 3, 2.0),
    ]
    assert [one.key for one in found[1].health.issues] == ["EXPLODING:W_in"]
    assert found[2].groups["W_out"].norm == pytest.approx(1.6)
    assert (found[0].loss, found[0].clipping.norm_after, found[0].clipping.coefficient) == (1.0, 1.0, 0.5)


def test_many_steps_are_thinned_out(tmp_path: Path) -> None:
    """Of a long run evenly spaced steps are drawn, and every one with an issue."""
    rows = [pages_row(step, issues=[issue("W_in")] if step == 4500 else []) for step in range(1, 4501)]
    found, _ = recorded_reports(write_run(tmp_path, *rows), {"": 9999})
    assert [one.step for one in found] == [*range(1, 4500, 3), 4500]


def test_the_picture_at_the_end_shows_the_whole_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are no longer in memory, and those from before a resume, come from the journals."""
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    curves: list[Any] = []
    draw, draw_curves = pictures.draw_gradient_statistics_over_time, pictures.draw_training_curves

    def spy(rows: Any, **options: Any) -> Any:
        drawn.append(rows)
        assert ((6, "resumed") in options["events"]) == (len(drawn) > 1)
        return draw(rows)

    def spy_curves(reports: Any, **options: Any) -> Any:
        curves.append(([report.step for report in reports], options["resumed"]))
        return draw_curves(reports, **options)

    monkeypatch.setattr(pictures, "draw_training_curves", spy_curves)

    monkeypatch.setattr(pictures, "draw_gradient_statistics_over_time", spy)
    model, state = torch.nn.Linear(2, 1), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with GradientManager(run_dir=tmp_path, max_gradient_history=2, grad_log_every_n_steps=2) as manager:
            if state is not None:
                manager.load_state_dict(state)
            for _ in range(6):
                optimizer.zero_grad()
                manager.step(model, optimizer, model(torch.ones(1, 2)).square().sum())
                optimizer.step()
            state = manager.state_dict()
    assert [rows["step"] for rows in drawn] == [[1, 2, 4, 5, 6], [1, 2, 4, 6, 8, 10, 11, 12]]
    assert all(len(values) == 8 for values in drawn[1].values())
    assert curves == [([1, 2, 4, 5, 6], {}), ([1, 2, 4, 6, 8, 10, 11, 12], {"": [6]})]
