"""Faults of a TensorBoard directory around whole trainings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")

from tests.faults.programs import held, journaled, once, replay, run

STEPS = range(1, 121)
TRAIN = """
    import shutil
    loop = Loop(directory / "run", backends_of(tracker, directory), close_timeout_seconds={close})
    loop.run(60)
    await_delivery(loop, 60)
    {fault}
    loop.run(60)
    loop.manager.close()
    print(json.dumps([loop.manager.status()["backends"]["tensorboard"], loop.manager.status()["journal"]]))
"""


@pytest.mark.slow
def test_case_14_disk_without_room_for_event_files(tmp_path: Path) -> None:
    """Where no file can grow the training goes on, what is missing is told, and a replay brings what is journaled."""
    program = TRAIN.format(
        close=1.0,
        fault="""import resource
    sizes = [path.stat().st_size for path in (directory / "logs").glob("*tfevents*")]
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes) + 5000, resource.RLIM_INFINITY))""",
    )
    done = run(program, tmp_path, "tensorboard")
    assert done.returncode == 0, done.stderr
    status, journal = json.loads(done.stdout.splitlines()[-1])
    kept = held(tmp_path, "tensorboard")
    assert kept == once(range(1, status["acknowledged"] + 1))
    assert 60 <= status["acknowledged"] < 120
    assert journal["rows"] + journal["failed"] == 120
    replay(tmp_path)
    assert held(tmp_path, "tensorboard") == once(range(1, max(len(journaled(tmp_path)), len(kept)) + 1))


def test_case_15_removed_directory(tmp_path: Path) -> None:
    """The directory is made again, its loss is told, and a replay brings back what it held."""
    done = run(TRAIN.format(close=60.0, fault='shutil.rmtree(directory / "logs")'), tmp_path, "tensorboard")
    assert done.returncode == 0, done.stderr
    assert "was removed" in done.stderr
    assert held(tmp_path, "tensorboard") == once(range(61, 121))
    replay(tmp_path)
    assert held(tmp_path, "tensorboard") == once(STEPS)


@pytest.mark.slow
def test_case_15_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """What cannot be written is told at the close, and comes by a replay when it can be."""
    fault = 'shutil.rmtree(directory / "logs"); (directory / "logs").write_text("in the way")'
    done = run(TRAIN.format(close=1.0, fault=fault), tmp_path, "tensorboard")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])[0]["acknowledged"] == 60
    assert "tensorboard has 60 of 120 rows (60 pending" in done.stderr
    (tmp_path / "logs").unlink()
    replay(tmp_path)
    assert held(tmp_path, "tensorboard") == once(STEPS)
