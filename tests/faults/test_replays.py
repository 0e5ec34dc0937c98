"""A replay that is killed half way: the next one brings the rest, and no row twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.delivery.training import Loop
from tests.faults.programs import NORM, held, journaled, once, prepare, replay
from tests.processes import ROOT

for needed in ("mlflow", "tensorboard", "wandb"):
    pytest.importorskip(needed)

from tests.faults.trackers import backends_of  # noqa: E402

STEPS = range(1, 1301)
slow = pytest.mark.slow
# Each program ends the replay by SIGKILL while the tracker's own file or store is being written.
KILLS = {
    "tensorboard": """
        from gradtrack.backends.tensorboard.files import EventFile
        append = EventFile._append
        class Torn:
            def __init__(self, stream): self.stream = stream
            def seek(self, *place): return self.stream.seek(*place)
            def truncate(self, size): return self.stream.truncate(size)
            def write(self, view):
                self.stream.write(view[: len(view) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        def kill(self, stream, found):
            append(self, Torn(stream) if next(calls) == 1 else stream, found)
        EventFile._append = kill
    """,
    "mlflow": """
        from gradtrack.backends.mlflow.store import Store
        log = Store.log
        def kill(self, run_id, metrics):
            log(self, run_id, metrics)
            if next(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        Store.log = kill
    """,
    "wandb": """
        from gradtrack.backends.wandb.rows import OwnRows
        write = OwnRows.write
        def kill(self, row, step):
            write(self, row, step)
            if next(calls) == 700:
                os.kill(os.getpid(), signal.SIGKILL)
        OwnRows.write = kill
    """,
}
LEAD = """
import itertools, os, signal, sys
calls = itertools.count(1)
"""
CALL = """
from gradtrack.delivery.replay import replay
def progress(name, done, total):
    print(done, flush=True)
replay(sys.argv[1], progress=progress, allowed=[sys.argv[2]])
"""


def killed(directory: Path, tracker: str) -> None:
    """Replay in a process that is killed in the middle of it."""
    inherited = {name: value for name, value in os.environ.items() if "WANDB_SERVICE" not in name}
    own = {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    program = LEAD + textwrap.dedent(KILLS[tracker]) + CALL
    command = [sys.executable, "-c", program, str(directory / "run"), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**inherited, **own}, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    "tracker", ["tensorboard", pytest.param("mlflow", marks=slow), pytest.param("wandb", marks=slow)]
)
def test_case_07_killed_replay_is_completed_by_the_next(tmp_path: Path, tracker: str) -> None:
    """After SIGKILL in the middle of a replay, and of a write, the next replay brings each missing row once."""
    prepare(tmp_path, tracker)
    loop = Loop(tmp_path / "run", ["json"])
    loop.run(len(STEPS))
    loop.manager.close()
    assert journaled(tmp_path) == list(STEPS)
    name, options = _destination(tmp_path, tracker)
    _name_in_journal(tmp_path, name, options)
    killed(tmp_path, tracker)
    before = held(tmp_path, tracker)
    assert before <= once(STEPS)
    assert sum(before.values()) < len(STEPS)
    if tracker != "wandb":  # which keeps the last second of rows in the memory of a process that died as well
        assert before
    for _ in range(2):
        replay(tmp_path)
        assert held(tmp_path, tracker) == once(STEPS)


def _destination(directory: Path, tracker: str) -> tuple[str, dict[str, str]]:
    """Return a tracker's name and options, as a journal holds them."""
    (spec,) = backends_of(tracker, directory)
    return spec["name"], {name: str(value) for name, value in spec.items() if name != "name"}


def _name_in_journal(directory: Path, name: str, options: dict[str, str]) -> None:
    """Let the journal say that its rows were to go to a tracker, which has none of them."""
    import json

    (part,) = (directory / "run").glob("journal-*.jsonl")
    first, *rows = part.read_bytes().splitlines(keepends=True)
    header = {**json.loads(first), "backends": [{"name": name, "options": options}]}
    part.write_bytes(b"".join([f"{json.dumps(header)}\n".encode(), *rows]))
    part.with_suffix(".acknowledged.json").unlink()
    assert NORM.encode() in rows[0]
