"""Statistics from the journals of a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradtrack import GradientManager
from gradtrack.pages import pictures
from gradtrack.pages.run_data import recorded_statistics
from gradtrack.records import Record
from tests.pages.runs import write_run


def row(step: int, size: float, *, source: str = "") -> Record:
    """Make a row with every statistic of the whole."""
    tail = f"/{source}" if source else ""
    metrics = {f"train/grad_{name}{tail}": size for name in ("variance", "norm", "mean", "max", "min")}
    return Record(step=step, time=1.0, metrics=metrics, source=source)


def test_resumed_runs_are_one_training(tmp_path: Path) -> None:
    """Where the second run begins, what the first did from there on counts no longer."""
    write_run(tmp_path, *(row(step, 1.0) for step in (10, 20, 30, 40)), run_id="first", created=1.0)
    write_run(tmp_path, *(row(step, 2.0) for step in (25, 30, 35)), run_id="second", created=2.0)
    found = recorded_statistics(tmp_path, before=35)
    assert found["step"] == [10, 20, 25, 30]
    assert found["grad_max"] == [1.0, 1.0, 2.0, 2.0]


def test_pairs_are_kept_apart(tmp_path: Path) -> None:
    """Only the rows of the pair that was asked for are returned, and none where there is no journal."""
    assert recorded_statistics(tmp_path, before=9)["step"] == []
    write_run(tmp_path, row(1, 1.0), row(1, 3.0, source="critic"), row(2, 4.0, source="critic"))
    assert recorded_statistics(tmp_path, source="critic", before=9)["grad_norm"] == [3.0, 4.0]


def test_the_picture_at_the_end_shows_the_whole_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are no longer in memory, and those from before a resume, come from the journals."""
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    draw = pictures.draw_gradient_statistics_over_time

    def spy(rows: Any, **_: Any) -> Any:
        drawn.append(rows)
        return draw(rows)

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
    assert [rows["step"] for rows in drawn] == [[2, 4, 5, 6], [2, 4, 6, 8, 10, 11, 12]]
    assert all(len(values) == 7 for values in drawn[1].values())
