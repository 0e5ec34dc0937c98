"""Trainings with real trackers in processes of their own, and what the trackers hold afterwards."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any, Final

from gradtrack.delivery.journal.reading import find_journals
from tests.backends.history import rows_of
from tests.backends.stores import empty_store
from tests.processes import ROOT

NORM: Final = "train/grad_norm"
TRACKERS: Final = ("tensorboard", "mlflow", "wandb", "attached wandb")
_LEAD: Final = """
import atexit, json, logging, os, signal, sys, time
from pathlib import Path
from tests.faults.trackers import backends_of
from tests.delivery.training import Loop, UsualLoop
directory, tracker = Path(sys.argv[1]), sys.argv[2]
def user_logs(loop):
    if tracker == "attached wandb":
        import wandb
        wandb.log({"loss": 1.0}, step=loop.manager.status()["steps"].get("default", 0))
def train(loop, steps):
    for _ in range(steps):
        loop.run(1)
        user_logs(loop)
def await_delivery(loop, count=1):
    end = time.monotonic() + 180
    while time.monotonic() < end:
        if all(found["acknowledged"] >= count for found in loop.manager.status()["backends"].values()):
            return
        time.sleep(0.02)
    raise SystemExit(f"nothing arrives: {loop.manager.status()}")
"""


def start(program: str, directory: Path, tracker: str, **environment: str) -> subprocess.Popen[str]:
    """Start a training program; it knows `directory`, `tracker`, `train` and `await_delivery`."""
    # Without this the program would use the W&B process of these tests.
    inherited = {name: value for name, value in os.environ.items() if "WANDB_SERVICE" not in name}
    own = {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(directory)}
    own |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", _LEAD + textwrap.dedent(program), str(directory), tracker],
        cwd=directory,
        env={**inherited, **own, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    program: str, directory: Path, tracker: str, *, timeout_seconds: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a training program to its end, whatever that is."""
    started = start(program, directory, tracker, **environment)
    out, err = started.communicate(timeout=timeout_seconds)
    return subprocess.CompletedProcess(started.args, started.returncode, out, err)


def prepare(directory: Path, tracker: str) -> None:
    """Lay out what a tracker needs."""
    if tracker == "mlflow":
        shutil.copy(empty_store(), directory / "store.db")


def replay(directory: Path, *more: str) -> str:
    """Call `gradtrack replay` as a user does, and return what it says."""
    program = "from gradtrack.cli import main; main()"
    inherited = {name: value for name, value in os.environ.items() if "WANDB_SERVICE" not in name}
    own = {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "WANDB_SILENT": "true", "COLUMNS": "200"}
    command = [sys.executable, "-c", program, "replay", str(directory / "run"), "--allow", str(directory), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**inherited, **own}, timeout=300)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def journaled(directory: Path) -> list[int]:
    """Return the steps in the journal."""
    (journal,) = [found for found in find_journals(directory / "run") if found.rank == 0]
    return [record.step for _, record in journal.rows()]


def held(directory: Path, tracker: str, *, ended: bool = False) -> Counter[int]:
    """Return how often a tracker has each step; `ended` says that every run of W&B's has come to an orderly end."""
    if tracker == "tensorboard":
        return _in_tensorboard(directory / "logs")
    if tracker == "mlflow":
        return _in_mlflow(f"sqlite:///{directory}/store.db")
    found: Counter[int] = Counter()
    for run_directory in sorted((directory / "wandb").glob("*run-*")):
        rows = rows_of(run_directory, ended=ended)
        found.update(row["gradtrack/step"] for row in rows if NORM in row and "gradtrack/step" in row)
    return found


def once(steps: range) -> Counter[int]:
    """Return each step once."""
    return Counter(steps)


def _in_tensorboard(directory: Path) -> Counter[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Counter[int] = Counter()
    for path in (directory, directory / "gradtrack-late"):
        if path.is_dir():
            reader = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
            if NORM in reader.Tags()["scalars"]:
                found.update(event.step for event in reader.Scalars(NORM))
    return found


def _in_mlflow(address: str) -> Counter[int]:
    mlflow: Any = importlib.import_module("mlflow")
    client = mlflow.MlflowClient(tracking_uri=address)
    experiments = [found.experiment_id for found in client.search_experiments()]
    runs = client.search_runs(experiments)
    assert len(runs) <= 1, "a stray run"
    return Counter(point.step for run in runs for point in client.get_metric_history(run.info.run_id, NORM))
