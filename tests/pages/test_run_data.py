"""A run read back from its directory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from gradtrack import GradientManager
from gradtrack.delivery.run_files import RUN_END, RunEnd
from gradtrack.errors import JournalError
from gradtrack.pages import run_data
from gradtrack.pages.run_data import load_run
from gradtrack.records import Record
from gradtrack.reports import TrainingSummary
from gradtrack.support.progress import Bar
from tests.pages.runs import row, write_run


def test_the_newest_run_of_a_directory_is_read(tmp_path: Path) -> None:
    """A directory that was used twice shows its last run, with its rows as they were recorded."""
    write_run(tmp_path, row(1), run_id="old", created=1.0)
    write_run(tmp_path, row(1), row(2, norm=math.inf), run_id="new", created=2.0)
    run = load_run(tmp_path)
    assert run.run.run_id == "new"
    assert run.tracks[""].column("train/grad_norm").tolist() == [2.0, math.inf]
    assert run.tracks[""].loss.tolist() == [1.0, 0.5]
    assert run.state == "stopped without an end"


def test_the_end_of_another_run_is_not_its_own(tmp_path: Path) -> None:
    """What an earlier run in the same directory left is not the end of this one."""
    RunEnd(run_id="old", summary=TrainingSummary(total_steps=99)).save(tmp_path / RUN_END)
    run = load_run(write_run(tmp_path, row(1), run_id="new"))
    assert (run.state, run.total_steps) == ("stopped without an end", 1)


def test_an_end_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    """It is named, and the rows are shown."""
    write_run(tmp_path, row(1), row(2))
    (tmp_path / RUN_END).write_text("[]")
    run = load_run(tmp_path)
    assert (len(run.tracks[""].steps), run.end) == (2, None)
    assert "How the run ended is left out" in run.caveats[0]
    assert "run_end.json" in run.caveats[0]


def test_gaps_of_columns_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand names in the last of 100,000 rows would take a gigabyte: they are named, and the others stay."""
    monkeypatch.setattr(run_data, "_MOST_GAPS", 20)
    monkeypatch.setattr(run_data, "_COLUMN", 0)
    late = Record(step=9, time=1.0, metrics={"train/grad_norm": 1.0, "a": 1.0, "b": 2.0, "c": 3.0})
    write_run(tmp_path, *(row(step) for step in range(1, 9)), late)
    run = load_run(tmp_path)
    assert {"train/grad_norm", "a", "b"} <= set(run.tracks[""].names)
    assert "c" not in run.tracks[""].names
    assert run.caveats[0].startswith("metrics with long gaps are left out: c")


def test_damaged_rows_are_counted(tmp_path: Path) -> None:
    """What could not be read is said, and the rest is shown."""
    write_run(tmp_path, row(1))
    with (tmp_path / "journal-000.jsonl").open("a") as file:
        file.write('{"n": 1, "torn')
    run = load_run(tmp_path)
    assert len(run.damaged) == 1
    assert run.total_steps == 1


def test_a_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    """The error names the directory."""
    with pytest.raises(JournalError, match="holds no journal"):
        load_run(tmp_path)


def test_reading_a_watched_run_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes of the rows are counted, and a run is read in silence unless a caller waits for it."""
    counts: list[float] = []
    monkeypatch.setattr(Bar, "advance", lambda self, amount=1.0: counts.append(amount))
    write_run(tmp_path, row(1), row(2))
    assert len(load_run(tmp_path).tracks[""].steps) == 2
    assert counts == []
    load_run(tmp_path, watched=True)
    with (tmp_path / "journal-000.jsonl").open("rb") as journal:
        assert counts == [len(line) for line in journal.readlines()[1:]]


def test_a_training_is_read_back(tmp_path: Path) -> None:
    """What a manager recorded, how it ended and that it ended are all there."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"run_dir": tmp_path, "grad_log_every_n_steps": 1, "save_gradient_plots": False}
    with GradientManager(settings) as manager:
        for _ in range(3):
            report = manager.step(model, optimizer, model(torch.ones(1, 2)).square().sum())
        assert load_run(tmp_path).state == "running"
    run = load_run(tmp_path)
    assert run.state == "ended"
    assert run.total_steps == 3
    assert run.tracks[""].column("train/grad_norm")[-1] == report.clipping.norm_before
    assert run.end is not None
    assert run.end.last[0].parameters["weight"].norm > 0
