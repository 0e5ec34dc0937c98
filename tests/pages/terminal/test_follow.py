"""A run watched while it trains."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from gradtrack.delivery.journal.writing import Journal
from gradtrack.pages.terminal.follow import follow
from gradtrack.records import RunInfo
from tests.pages.runs import issue, row, write_run


def test_rows_are_told_as_they_come(tmp_path: Path) -> None:
    """Without a terminal each row is a line, told once, until the run ends."""
    journal = Journal(tmp_path, RunInfo(run_id="a-run"))
    journal.append(0, row(1))
    coming = [row(2, norm=4.0), row(3, issues=[issue()])]
    console = Console(file=io.StringIO(), width=200)

    def pause(_: float) -> None:
        if coming:
            journal.append(3 - len(coming), coming.pop(0))
        else:
            journal.close(5.0)

    run = follow(tmp_path, console, pause=pause)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "step 1  loss 1  gradient norm 2  healthy",
        "step 2  loss 0.5  gradient norm 4  healthy",
        "step 3  loss 0.3333  gradient norm 2  unhealthy",
    ]
    assert run.total_steps == 3
    assert not run.is_running


def test_a_run_that_takes_long_to_read_is_read_less_often(tmp_path: Path) -> None:
    """It rests for three times as long as reading took, and for a second at the least."""
    journal = Journal(tmp_path, RunInfo(run_id="a-run"))
    journal.append(0, row(1))
    clock = iter([0.0, 0.1, 10.0, 14.0, 15.0, 15.0])
    rests: list[float] = []

    def pause(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 1:
            journal.append(1, row(2))
        else:
            journal.close(5.0)

    follow(tmp_path, Console(file=io.StringIO()), pause=pause, clock=lambda: next(clock))
    assert rests == [1.0, 12.0]


def test_a_terminal_shows_the_whole_run(tmp_path: Path) -> None:
    """On a terminal the picture of the run is renewed in place."""
    write_run(tmp_path, row(1), row(2))
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    follow(tmp_path, console, pause=lambda _: None)
    assert isinstance(console.file, io.StringIO)
    assert "2 steps" in console.file.getvalue()
