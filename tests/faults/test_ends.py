"""However a training ends, each real tracker has every recorded row once, at the latest after a replay."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.programs import TRACKERS, held, journaled, once, prepare, replay, run

for needed in ("mlflow", "tensorboard", "wandb"):
    pytest.importorskip(needed)

STEPS = range(1, 121)
ENDS = {
    "test_case_07": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "test_case_08": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
}
slow = pytest.mark.slow
SOME = [tracker if tracker == "tensorboard" else pytest.param(tracker, marks=slow) for tracker in TRACKERS]


def end(directory: Path, tracker: str, case: str, loop: str = "Loop") -> None:
    """Train, end in the middle of a delivery, and hold journal and tracker to every step after a replay."""
    prepare(directory, tracker)
    how, code = ENDS[case]
    program = f"""
        loop = {loop}(directory / "run", backends_of(tracker, directory))
        train(loop, 60)
        await_delivery(loop)
        train(loop, 60)
        {how}
    """
    done = run(program, directory, tracker)
    assert done.returncode == code, done.stderr
    assert journaled(directory) == list(STEPS)
    assert held(directory, tracker) <= once(STEPS)
    for _ in range(2):
        replay(directory)
        assert held(directory, tracker) == once(STEPS)


@pytest.mark.parametrize("tracker", SOME)
def test_case_07_killed_training_is_complete_after_a_replay(tmp_path: Path, tracker: str) -> None:
    """SIGKILL in the middle of a delivery costs no row of any tracker, and doubles none."""
    end(tmp_path, tracker, "test_case_07")


@pytest.mark.parametrize("tracker", SOME)
def test_case_07_killed_between_usual_steps_is_complete_after_a_replay(tmp_path: Path, tracker: str) -> None:
    """Also of rows that were no lines of the journal yet."""
    end(tmp_path, tracker, "test_case_07", "UsualLoop")


@slow
@pytest.mark.parametrize("tracker", SOME)
def test_case_08_terminated_training_is_complete_after_a_replay(tmp_path: Path, tracker: str) -> None:
    """SIGTERM, soon after the start, costs no row of any tracker, and doubles none."""
    end(tmp_path, tracker, "test_case_08")


@pytest.mark.parametrize("tracker", SOME)
def test_case_19_steps_that_come_again_are_rows_of_their_own(tmp_path: Path, tracker: str) -> None:
    """A training that goes back to a checkpoint has the steps from there on twice, and a replay adds none."""
    prepare(tmp_path, tracker)
    program = """
        loop = Loop(directory / "run", backends_of(tracker, directory), close_timeout_seconds=60.0)
        loop.run(60)
        checkpoint = loop.manager.state_dict()
        loop.run(30)
        await_delivery(loop)
        loop.run(30)
        loop.manager.load_state_dict(checkpoint)
        loop.run(60)
    """
    done = run(program, tmp_path, tracker)
    assert done.returncode == 0, done.stderr
    expected = once(STEPS) + once(range(61, 121))
    assert Counter(journaled(tmp_path)) == expected
    assert held(tmp_path, tracker, ended=True) == expected
    replay(tmp_path)
    assert held(tmp_path, tracker, ended=True) == expected


EXITS = [*(pytest.param(tracker, marks=slow) for tracker in TRACKERS), "user's writer"]


@pytest.mark.parametrize("tracker", EXITS)
def test_case_21_exit_without_close_reaches_the_tracker(tmp_path: Path, tracker: str) -> None:
    """A script that just ends has delivered everything, without a replay; TensorBoard alone would lose four rows."""
    prepare(tmp_path, tracker)
    program = """
        loop = Loop(directory / "run", backends_of(tracker, directory), close_timeout_seconds=60.0)
        train(loop, 60)
        await_delivery(loop)  # by now the tracker's package has registered an end of its own
        train(loop, 60)
    """
    done = run(program, tmp_path, tracker)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    name = "tensorboard" if tracker == "user's writer" else tracker
    assert held(tmp_path, name, ended=True) == once(STEPS)
