"""Several runs on one directory: each keeps every row of its own, and none writes over another's files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gradtrack.backends.json import JsonBackend
from gradtrack.delivery.journal.reading import find_journals, find_runs, open_run
from gradtrack.delivery.locks import Claim, claim_or_own
from gradtrack.delivery.replay import replay
from gradtrack.delivery.run_files import RUN_END, RunEnd
from gradtrack.errors import JournalError, UsageError
from tests.delivery.training import Loop, run_script, start_script

BUSY = "is being written to by another run"


def steps_in(directory: Path) -> list[int]:
    """Return the steps in the JSON file of a directory."""
    found: list[int] = json.loads((directory / "gradient_statistics.json").read_text())["step"]
    return found


def check(directory: Path, run_id: str, steps: int) -> None:
    """Hold a run's directory to its law: journal, file and end are its own, and nothing is missing."""
    (journal,) = find_journals(directory)
    assert journal.run.run_id == run_id
    assert [record.step for _, record in journal.rows()] == list(range(1, steps + 1))
    assert steps_in(directory) == list(range(1, steps + 1))
    assert open_run(f"{directory}@{run_id}").directory == directory
    end = RunEnd.load(directory / RUN_END)
    assert end is not None
    assert (end.run_id, end.summary.total_steps) == (run_id, steps)
    (done,) = replay(f"{directory}@{run_id}")
    assert (done.complete, done.present, done.delivered) == (True, steps, 0)


def test_second_manager_has_a_directory_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two managers that record at once into one run_dir lose no row of either; the second says where its files are."""
    first, second = Loop(tmp_path, ["json"]), Loop(tmp_path, ["json"])
    for _ in range(20):
        first.run(1)
        second.run(2)
    first.manager.close()
    second.manager.close()
    ids = [str(loop.manager.status()["run_id"]) for loop in (first, second)]
    assert [loop.manager.run_dir for loop in (first, second)] == [tmp_path, tmp_path / ids[1]]
    check(tmp_path, ids[0], 20)
    check(tmp_path / ids[1], ids[1], 40)
    (told,) = [message for message in caplog.messages if BUSY in message]
    assert ids[1] in told


def test_run_that_ended_keeps_its_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Runs after one that was closed, in one process, have directories of their own, named by their identity."""
    loops = []
    for steps in (3, 2, 5):
        loops.append(Loop(tmp_path, ["json"]))
        loops[-1].run(steps)
        loops[-1].manager.close()
    ids = [str(loop.manager.status()["run_id"]) for loop in loops]
    places = [tmp_path, tmp_path / ids[1], tmp_path / ids[2]]
    assert [loop.manager.run_dir for loop in loops] == places
    for place, run_id, steps in zip(places, ids, (3, 2, 5), strict=True):
        check(place, run_id, steps)
    assert [run.run_id for run in find_runs(tmp_path)] == ids
    assert [open_run(f"{tmp_path}@{number}").run_id for number in (1, 2, 3)] == ids
    assert open_run(tmp_path).run_id == ids[2]
    assert sum(run_id in caplog.text and "has the files of another run" in caplog.text for run_id in ids[1:]) == 2


def test_training_of_a_second_process_keeps_the_files_of_the_first(tmp_path: Path) -> None:
    """A script that is run again into its directory, with pictures and a page, leaves the files alone."""
    code = "loop = Loop(sys.argv[1], ['json'], save_gradient_plots=True, save_html_report=True)\nloop.run(3)\n"
    code += "loop.manager.close()\nprint(loop.manager.run_dir)\n"
    first = run_script(code, tmp_path / "exp")
    before = {path: path.read_bytes() for path in (tmp_path / "exp").iterdir()}
    second = run_script(code, tmp_path / "exp")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    places = [Path(one.stdout.strip()) for one in (first, second)]
    assert {path: path.read_bytes() for path in places[0].iterdir() if path.is_file()} == before
    assert {path.name for path in before} == {path.name for path in places[1].iterdir()}
    assert [run.directory for run in find_runs(tmp_path / "exp")] == places
    assert first.stderr == ""
    assert f"goes to {str(places[1])!r}" in second.stderr


def test_run_without_a_row_keeps_its_end(tmp_path: Path) -> None:
    """What a training that was too short for a row left at its end is there after the next one."""
    loops = [Loop(tmp_path, ["json"], grad_log_every_n_steps=100) for _ in range(2)]
    for loop in loops:
        loop.run(2)
        loop.manager.close()
    end = RunEnd.load(tmp_path / RUN_END)
    assert end is not None
    assert end.run_id == loops[0].manager.status()["run_id"]


@pytest.mark.parametrize("given", [False, True])
def test_resumed_training_goes_on_in_the_directory(
    tmp_path: Path, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state leads to the directory of its run, given or chosen by gradtrack, whatever other runs are there."""
    monkeypatch.chdir(tmp_path)
    run_dir: Any = tmp_path / "exp" if given else None
    other, first = Loop(run_dir, ["json"]), Loop(run_dir, ["json"])
    for loop, steps in ((other, 9), (first, 4)):
        loop.run(steps)
        loop.manager.close()
    second = Loop(run_dir, ["json"])
    second.manager.load_state_dict(first.manager.state_dict())
    assert second.manager.run_dir == first.manager.run_dir != other.manager.run_dir
    second.run(3)
    second.manager.close()
    assert first.manager.run_dir is not None
    assert second.manager.run_dir == first.manager.run_dir
    assert steps_in(first.manager.run_dir) == [1, 2, 3, 4, 5, 6, 7]
    found = open_run(f"{first.manager.run_dir}@{second.manager.status()['run_id']}")
    assert found.run_id == first.manager.status()["run_id"]
    assert [row.step for row in found.rows()] == [1, 2, 3, 4, 5, 6, 7]
    assert [dict(journal.run.resumed_at) for journal in found.journals] == [{}, {"": 4}]


def test_rows_that_are_made_again_are_left_out(tmp_path: Path) -> None:
    """A run shows the newest of two trainings from one checkpoint; the other is opened by its identity."""
    loop = Loop(tmp_path, ["memory"])
    loop.run(2)
    state = loop.manager.state_dict()
    loop.run(3)
    loop.manager.close()
    ids = [str(loop.manager.status()["run_id"])]
    for steps in (1, 2):
        again = Loop(tmp_path, ["memory"])
        again.manager.load_state_dict(state)
        again.run(steps)
        again.manager.close()
        ids.append(str(again.manager.status()["run_id"]))
    (run,) = find_runs(tmp_path)
    assert (run.run_id, [row.step for row in run.rows()]) == (ids[0], [1, 2, 3, 4])
    assert [row.step for row in open_run(f"{tmp_path}@{ids[1]}").rows()] == [1, 2, 3]
    with pytest.raises(UsageError, match="expected a run of"):
        open_run(f"{tmp_path}@2")


def test_two_processes_keep_apart(tmp_path: Path) -> None:
    """Trainings of two processes that were given one run_dir have every row, each in files of its own."""
    code = """
loop = Loop(sys.argv[1], ["json"])
loop.run(20)
print(loop.manager.run_dir, flush=True)
sys.stdin.readline()
loop.run(20)
loop.manager.close()
print(loop.manager.status()["run_id"], flush=True)
"""
    lead = "import os, sys; os.dup2(os.open(sys.argv[2], os.O_RDONLY), 0)\n"
    os.mkfifo(tmp_path / "go")
    started = [start_script(lead + code, tmp_path / "run", tmp_path / "go") for _ in range(2)]
    gate = os.open(tmp_path / "go", os.O_WRONLY)
    directories = [Path(one.stdout.readline().strip()) for one in started if one.stdout is not None]
    os.write(gate, b"\n\n")
    os.close(gate)
    ends = [one.communicate(timeout=120) for one in started]
    assert [one.returncode for one in started] == [0, 0], ends
    assert len(set(directories)) == 2
    assert tmp_path / "run" in directories
    assert sum(BUSY in err for _, err in ends) == 1
    for directory, (out, _) in zip(directories, ends, strict=True):
        check(directory, out.strip(), 40)


def test_run_that_begins_during_a_replay_keeps_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A replay may write to files of the directory, so a training that begins meanwhile leaves them alone."""
    first, second = Loop(tmp_path, ["json"]), Loop(tmp_path, ["json"])
    first.run(4)
    first.manager.close()
    (tmp_path / "gradient_statistics.json").unlink()
    (done,) = replay(tmp_path, progress=lambda *_: second.run(2))
    second.manager.close()
    assert done.delivered == 4
    assert BUSY in caplog.text
    assert (steps_in(tmp_path), steps_in(tmp_path / str(second.manager.status()["run_id"]))) == ([1, 2, 3, 4], [1, 2])


def test_replay_waits_for_the_writer_of_the_directory(tmp_path: Path) -> None:
    """A replay leaves out the run of a directory that goes on, and is refused where that is all that was asked for."""
    first, second = Loop(tmp_path, ["json"]), Loop(tmp_path, ["json"])
    first.run(4)
    first.manager.close()
    second.run(2)
    told: list[str] = []
    assert [done.rows for done in replay(tmp_path, tell=told.append)] == [4]
    assert "still being written" in told[0]
    with pytest.raises(JournalError, match="still being written"):
        replay(f"{tmp_path}@2")
    second.manager.close()
    assert [(done.complete, done.rows) for done in replay(tmp_path)] == [(True, 4), (True, 2)]


@pytest.mark.parametrize("option", ["directory", "log_dir"])
def test_given_directory_of_a_backend_is_kept_apart_too(
    tmp_path: Path, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two runs whose backends were given one directory have each row of either once, also after a replay."""
    if option == "log_dir":
        pytest.importorskip("tensorboard")
    backend: dict[str, Any] = {"name": "json" if option == "directory" else "tensorboard", option: tmp_path / "shared"}
    loops = [Loop(tmp_path / name, [backend]) for name in ("first", "second")]
    for _ in range(10):
        for loop in loops:
            loop.run(2)
    for loop in loops:
        loop.manager.close()
    own = tmp_path / "shared" / str(loops[1].manager.status()["run_id"])
    assert own.is_dir()
    assert caplog.text.count(BUSY) == 1
    for name in ("first", "second"):
        for _ in range(2):
            (done,) = replay(tmp_path / name, allowed=[tmp_path / "shared"])
            assert (done.complete, done.present, done.delivered) == (True, 20, 0)
    for directory in (tmp_path / "shared", own):
        found = steps_in(directory) if option == "directory" else drawn_in(directory)
        assert found == list(range(1, 21)), directory


def test_replay_of_a_run_that_moved_aside_leaves_the_other_alone(tmp_path: Path) -> None:
    """What TensorBoard is missing of a run with a directory of its own goes there, not among the other's events."""
    pytest.importorskip("tensorboard")
    shared = tmp_path / "shared"
    loops = [Loop(tmp_path / name, [{"name": "tensorboard", "log_dir": shared}]) for name in ("first", "second")]
    for loop, steps in zip(loops, (3, 5), strict=True):
        loop.run(steps)
        loop.manager.flush()
    for loop in loops:
        loop.manager.close()
    own = shared / str(loops[1].manager.status()["run_id"])
    for left in own.glob("events.*"):
        left.unlink()
    (done,) = replay(tmp_path / "second", allowed=[shared])
    assert (done.complete, done.delivered) == (True, 5)
    assert (drawn_in(shared), drawn_in(own)) == ([1, 2, 3], [1, 2, 3, 4, 5])


def drawn_in(directory: Path) -> list[int]:
    """Return the steps of a curve that TensorBoard draws for a directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in reader.Scalars("train/grad_norm")]


def test_forked_copy_does_not_keep_a_directory(tmp_path: Path) -> None:
    """What the parent has let go is free, however long a copy of it lives."""
    claim = Claim(tmp_path)
    inward, outward = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(outward)
        os.read(inward, 1)
        os._exit(0)
    claim.release()
    try:
        assert Claim(tmp_path).held
    finally:
        os.close(outward)
        os.waitpid(child, 0)
        os.close(inward)


def test_identity_from_a_journal_names_no_other_place(tmp_path: Path) -> None:
    """The identity of a run may come from a journal of any author: it leads out of no directory."""
    claim = Claim(tmp_path / ".")
    chosen, own = claim_or_own(tmp_path, "../../elsewhere", what="x")
    assert chosen.resolve().is_relative_to(tmp_path.resolve())
    assert chosen.parent == tmp_path
    for one in (claim, own):
        one.release()


def test_explicit_run_directory_is_no_conflict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A JSON backend that was given the run's own directory has its files there."""
    loop = Loop(tmp_path, [JsonBackend(tmp_path)])
    loop.run(3)
    loop.manager.close()
    assert steps_in(tmp_path) == [1, 2, 3]
    assert BUSY not in caplog.text


@pytest.mark.parametrize("place", ["", "shared"])
def test_one_run_may_use_a_directory_in_several_ways(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of two backends lie side by side, also in the run's own directory, and a replay finds them there."""
    pytest.importorskip("tensorboard")
    directory = tmp_path / place
    backends = [{"name": "json", "directory": directory}, {"name": "tensorboard", "log_dir": directory}]
    loop = Loop(tmp_path, backends)
    loop.run(3)
    loop.manager.close()
    assert steps_in(directory) == drawn_in(directory) == [1, 2, 3]
    assert [(done.present, done.delivered) for done in replay(tmp_path)] == [(3, 0), (3, 0)]
    for left in directory.glob("events.*"):
        left.unlink()
    assert sorted(done.delivered for done in replay(tmp_path)) == [0, 3]
    assert drawn_in(directory) == [1, 2, 3]
    assert BUSY not in caplog.text


def test_claims_of_one_run_end_with_the_last(tmp_path: Path) -> None:
    """What one claim of a run lets go is kept as long as another one is left."""
    first, second = Claim(tmp_path, "run"), Claim(tmp_path, "run")
    first.release()
    first.release()
    assert second.held
    assert not Claim(tmp_path, "other").held
    second.release()
    assert Claim(tmp_path, "other").held
