"""Faults of Weights & Biases around whole trainings."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb")

from tests.faults.programs import held, journaled, once, replay, run

STEPS = range(1, 121)
slow = pytest.mark.slow


@pytest.mark.parametrize("mode", ["polite", pytest.param("row", marks=slow)])
def test_case_06_run_that_the_user_finished_first(tmp_path: Path, mode: str) -> None:
    """The loop goes on, the exit code stays, the rows that came after are told and come by the replay that is named."""
    program = f"""
        import wandb
        backends_of(tracker, directory)
        loop = Loop(directory / "run", [dict(name="wandb", step_mode="{mode}")])
        train(loop, 60)
        await_delivery(loop, 60)
        wandb.run.finish()
        loop.run(60)
        loop.manager.close()
        print(json.dumps(loop.manager.status()["backends"]["wandb"]))
        sys.exit(7)
    """
    done = run(program, tmp_path, "attached wandb")
    assert done.returncode == 7, done.stderr
    status = json.loads(done.stdout.splitlines()[-1])
    assert (status["acknowledged"], status["refused"] + status["pending"]) == (60, 60)
    assert f"gradtrack replay {tmp_path}/run" in done.stderr
    assert journaled(tmp_path) == list(STEPS)
    assert held(tmp_path, "attached wandb") == once(range(1, 61))
    replay(tmp_path)
    assert held(tmp_path, "attached wandb") == once(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["attached wandb", pytest.param("wandb", marks=slow)])
def test_case_09_killed_core_does_not_reach_the_training(tmp_path: Path, tracker: str) -> None:
    """After W&B's own process was killed the training goes on, one warning tells, and a replay completes the run."""
    program = """
        import psutil
        loop = Loop(directory / "run", backends_of(tracker, directory), close_timeout_seconds=3.0)
        loop.run(60)
        await_delivery(loop)
        for child in psutil.Process().children(recursive=True):
            if "wandb-core" in child.name():
                child.kill()
                child.wait()
        loop.run(60)
        loop.manager.close()
        print(json.dumps(loop.manager.status()["backends"]["wandb"]), flush=True)
        os._exit(0)  # W&B's own exit prints what it thinks of this
    """
    done = run(program, tmp_path, tracker)
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout.splitlines()[-1])
    assert status["acknowledged"] < 120
    assert 1 <= done.stderr.count("the rows are kept until it is back") <= 2
    assert journaled(tmp_path) == list(STEPS)
    replay(tmp_path)
    assert held(tmp_path, tracker) == once(STEPS)


def test_case_10_own_run_without_a_server(tmp_path: Path) -> None:
    """A run of our own whose server is unreachable is offline at once: a training of a moment is in its file."""
    program = """
        loop = Loop(directory / "run", backends_of(tracker, directory), close_timeout_seconds=60.0)
        train(loop, 120)
        loop.manager.close()
        print(json.dumps(loop.manager.status()["backends"]["wandb"]))
    """
    done = run(program, tmp_path, "wandb", **unreachable("http://127.0.0.1:9"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["acknowledged"] == 120
    assert done.stderr.count("the run is kept offline") == 1
    assert journaled(tmp_path) == list(STEPS)
    assert held(tmp_path, "wandb", ended=True) == once(STEPS)


def unreachable(address: str) -> dict[str, Any]:
    """Return the environment of a program that is online, with a key, and whose server is not there."""
    return {"WANDB_MODE": "online", "WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40, "WANDB_ENTITY": "tests"}


ATTACHED = """
    import wandb
    from tests.backends.wandb_server import WandbServer
    server = WandbServer()
    os.environ["WANDB_BASE_URL"] = server.address
    settings = wandb.Settings(mode={mode!r}, finish_timeout=1, x_disable_stats=True, console="off")
    run = wandb.init(project="faults", id="case", dir=str(directory), settings=settings)
    loop = Loop(directory / "run", ["wandb"], close_timeout_seconds=60.0)
    train(loop, 60)
    server.stop()
    train(loop, 60)
    loop.manager.close()
    assert wandb.run is run
    print(json.dumps(loop.manager.status()["backends"]["wandb"]), flush=True)
    run.finish()
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["online", "shared"])
def test_case_10_run_of_the_user_whose_server_goes_away(tmp_path: Path, mode: str) -> None:
    """An online or a shared run whose server stops answering costs no step an exception; its own file has all rows."""
    done = run(ATTACHED.format(mode=mode), tmp_path, "attached wandb", **unreachable(""))
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout.splitlines()[-1])
    assert (status["acknowledged"], status["lost"], status["refused"]) == (120, 0, 0)
    assert journaled(tmp_path) == list(STEPS)
    assert held(tmp_path, "attached wandb") == once(STEPS)


@pytest.mark.slow
def test_disabled_mode_keeps_the_journal(tmp_path: Path) -> None:
    """With WANDB_MODE=disabled a training runs as ever, its rows are in the journal, and none counts as taken."""
    program = """
        import wandb
        loop = Loop(directory / "run", backends_of(tracker, directory) + [{"name": "json"}])
        train(loop, 120)
        loop.manager.close()
        found = loop.manager.status()["backends"]["wandb"]
        print(found["acknowledged"], found["dropped"], found["pending"])
    """
    done = run(program, tmp_path, "attached wandb", WANDB_MODE="disabled")
    assert done.returncode == 0, done.stderr
    assert journaled(tmp_path) == list(STEPS)
    assert done.stdout.split() == ["0", "120", "0"]
    replay(tmp_path)
    assert held(tmp_path / "run", "attached wandb") == once(STEPS)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of a megabyte and a half, where mounting is allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small disk is not allowed here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=False)


FULL = """
    import wandb
    disk = directory / "disk"
    loop = Loop(directory / "run", backends_of(tracker, disk), close_timeout_seconds=20.0)
    train(loop, 60)
    await_delivery(loop)
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(filler, bytes(4096))
    except OSError:
        pass
    train(loop, 3000)
    loop.manager.close()
    print(json.dumps(loop.manager.status()["backends"]["wandb"]), flush=True)
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["wandb", "attached wandb"])
def test_case_14_full_disk_under_a_wandb_run_is_told(tmp_path: Path, small_disk: Path, tracker: str) -> None:
    """W&B itself says nothing when its file is cut short; our summary does not claim what is not there."""
    done = run(FULL, tmp_path, tracker, WANDB_DIR=str(small_disk))
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout.splitlines()[-1])
    assert len(held(small_disk, tracker)) < 3060
    assert any(told in status["unsettled"] for told in ("rows are in its file", "is full", "No space left"))
    assert "took, but may not have kept" in done.stderr
    assert journaled(tmp_path) == list(range(1, 3061))
