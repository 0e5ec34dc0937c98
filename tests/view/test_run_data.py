"""A run read back from its directory."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gradtrack import GradientManager
from gradtrack.errors import JournalError
from gradtrack.progress import Bar
from gradtrack.record.run_end import RUN_END, RunEnd
from gradtrack.records import Panel
from gradtrack.reports import IssueSeverity, IssueType, TrainingSummary
from gradtrack.view.run_data import load_run
from tests.view.runs import gather, issue, row, write_run


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
    assert str(track.last_loss()) == last


def test_a_nan_that_was_replaced_is_gone() -> None:
    """A resumed run that repeats a step repeats what it recorded."""
    bad, good, late = row(2, norm=math.nan, loss=math.nan), row(2, norm=3.0), row(3, metrics={}, loss=None)
    (track,) = gather(row(1), bad, good, late).tracks.values()
    assert (track.last("train/grad_norm"), track.last_loss()) == (3.0, 0.5)


def test_a_step_that_was_recorded_twice_is_one_row() -> None:
    """What is known late joins its step, and what a resumed run repeats replaces what was there."""
    late = row(1, metrics={"updates/ratio": 0.25}, loss=None)
    (track,) = gather(row(1), row(3), late, row(2), row(3, norm=9.0)).tracks.values()
    assert track.steps.tolist() == [1, 2, 3]
    assert track.column("train/grad_norm").tolist() == [2.0, 2.0, 9.0]
    assert track.column("updates/ratio")[0] == 0.25
    assert track.loss[0] == 1.0


def test_a_row_without_health_closes_no_issue() -> None:
    """A row with a late finding says nothing about the issues that are open."""
    run = gather(row(1, issues=[issue()]), row(1, metrics={"updates/ratio": 0.25}))
    assert [found.is_open for found in run.issues] == [True]


def test_pairs_have_tracks_with_the_same_names() -> None:
    """The name of a pair is taken out of its metrics, those of its groups too."""
    tracks = gather(row(1, source="D"), row(1, source="G", norm=5.0)).tracks
    assert list(tracks) == ["D", "G"]
    assert tracks["G"].last("train/grad_norm") == 5.0
    assert tracks["G"].groups == ["W_in", "W_out"]
    assert tracks["D"].last("train/grad_norm/W_out") == pytest.approx(1.6)


def test_issues_have_the_spans_in_which_they_were_open() -> None:
    """An issue may close and open again; its last end is open where the run ended with it."""
    sick = [issue()]
    run = gather(row(1), row(2, issues=sick), row(3, issues=sick), row(4), row(5, issues=sick))
    (found,) = run.issues
    assert found.spans == [(2, 4), (5, None)]
    assert found.is_open
    assert found.when == "steps 2 to 4 and from step 5"
    assert not run.healthy


@pytest.mark.parametrize(
    ("times", "told"),
    [(1, "steps 1 to 2"), (3, "steps 1 to 2, 3 to 4, 5 to 6"), (4, "steps 1 to 2, 3 to 4, 5 to 6 and once more")],
)
def test_many_spans_are_told_in_short(times: int, told: str) -> None:
    """The first three spans are told in full, and how many more there were."""
    run = gather(*(row(step, issues=[issue()] if step % 2 else []) for step in range(1, 2 * times + 1)))
    assert [found.when for found in run.issues] == [told]


def test_a_step_without_a_finite_gradient_has_no_norm() -> None:
    """A norm over no element at all is not a zero; one of a gradient that vanished is."""
    metrics = [{"train/grad_norm/head": norm, "train/grad_mean/head": mean} for norm, mean in
               ((1.0, 0.1), (0.0, math.nan), (0.0, 0.0), (0.0, math.nan))]  # fmt: skip
    (track,) = gather(*(row(step, metrics=found) for step, found in enumerate(metrics, 1))).tracks.values()
    assert np.array_equal(track.over_finite("train/grad_norm/head"), [1.0, math.nan, 0.0, math.nan], equal_nan=True)
    assert track.last_norm("head") == 0.0
    assert math.isnan(track.last("train/grad_norm/head") or 0.0)


def test_issues_of_two_pairs_are_two() -> None:
    """A row of one pair closes no issue of the other."""
    run = gather(row(1, issues=[issue()], source="D"), row(1, source="G"), row(2, source="G"))
    assert [(found.source, found.is_open) for found in run.issues] == [("D", True)]


def test_open_and_severe_issues_come_first() -> None:
    """A person reads from the top."""
    mild = issue("mild").model_copy(update={"severity": IssueSeverity.LOW})
    closed = issue("closed", IssueType.NUMERICAL)
    run = gather(row(1, issues=[mild, closed]), row(2, issues=[mild, issue("severe")]))
    assert [found.latest["layer"] for found in run.issues] == ["severe", "mild", "closed"]


def test_causes_come_before_what_they_explain() -> None:
    """A person reads first what to mend, whatever is worse."""
    worse = {"severity": IssueSeverity.CRITICAL, "explained_by": "EXPLODING:cause"}
    run = gather(row(1, issues=[issue("effect").model_copy(update=worse), issue("cause")]))
    assert [found.latest["layer"] for found in run.issues] == ["cause", "effect"]


def test_panels_are_gathered_from_the_rows() -> None:
    """A panel that a row declares belongs to the pair of the row."""
    panel = Panel(title="Radius", section="rnn", metrics=("rnn/radius",))
    assert gather(row(1), row(2, panels=(panel,)), row(3, panels=(panel,))).tracks[""].panels == (panel,)


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
    """All bytes of the rows are counted, and a run that nobody waits for is read in silence."""
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
