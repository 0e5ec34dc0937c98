"""What the faults of trackers and disks cost: the slow end of `manager.step` beside that of a healthy run.

Every run is a process of its own, in which a small model trains with a row at every step and `manager.step` alone is
timed, with its backward pass. A fault strikes when the first rows have been delivered, or is there from the start.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.models import Training
from benchmarks.servers import closed_port, faulty_server, mlflow_server, silent_server
from benchmarks.timing import Row
from gradtrack import Backend, GradientManager, Record

BAR = 2.0
HEALTHY = "healthy"
_READY_SECONDS = 12.0
Strike = Callable[[], object]
Setting = tuple[dict[str, Any], Strike]


def run(quick: bool = False) -> Iterator[Row]:
    """Measure every fault between healthy runs of the same tracker."""
    steps, rounds = (400, 1) if quick else (2000, 3)
    for tracker, faults in FAULTS.items():
        found: dict[str, list[float]] = {name: [] for name in faults}
        for _ in range(rounds):
            for name in faults:
                found[name].append(_in_a_process(tracker, name, steps))
        healthy = statistics.median(found.pop(HEALTHY))
        for name, slow in found.items():
            yield Row(
                benchmark="faults",
                case=f"{tracker}: {name}",
                what="p99 of a step / healthy run",
                ratio=statistics.median(slow) / healthy,
                bar=BAR,
                note=f"{statistics.median(slow) * 1e3:.2f} ms / {healthy * 1e3:.2f} ms",
            )


class Memory(Backend):
    """A tracker in this process, which does to its worker what a fault does."""

    name = "memory_tracker"

    def __init__(self, fault: Callable[[], object] = lambda: None) -> None:
        self._fault = fault

    def write(self, records: Sequence[Record]) -> None:
        self._fault()


@contextlib.contextmanager
def _mlflow(name: str, directory: Path) -> Iterator[Setting]:
    options: dict[str, Any] = {"name": "mlflow", "run_id": "0" * 32}
    if name in (HEALTHY, "dies"):
        with mlflow_server(directory) as server:
            strike = server.kill if name == "dies" else _nothing
            yield {"name": "mlflow", "tracking_uri": server.address}, strike
    elif name == "down":
        with closed_port() as address:
            yield {**options, "tracking_uri": address}, _nothing
    elif name == "never answers":
        with silent_server() as address:
            yield {**options, "tracking_uri": address}, _nothing
    else:
        with faulty_server(int(name.removeprefix("answers "))) as server:
            yield {**options, "tracking_uri": server.address}, _nothing


@contextlib.contextmanager
def _wandb(name: str, directory: Path) -> Iterator[Setting]:
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_CONSOLE="off", WANDB_DIR=str(directory))
    options = {"name": "wandb", "project": "faults"}
    if name == "server is unreachable":
        with closed_port() as address:
            os.environ.update(WANDB_MODE="online", WANDB_BASE_URL=address, WANDB_API_KEY="0" * 40)
            yield options, _nothing
    else:
        yield options, _kill_core if name == "wandb-core is killed" else _nothing


@contextlib.contextmanager
def _tensorboard(name: str, directory: Path) -> Iterator[Setting]:
    log_dir = directory / "logs"
    strikes: dict[str, Strike] = {
        "log directory is removed": lambda: shutil.rmtree(log_dir),
        "log directory cannot be written": lambda: _put_in_the_way(log_dir),
        "disk is full, the journal's too": lambda: _limit_files(8192),
    }
    yield {"name": "tensorboard", "log_dir": log_dir}, strikes.get(name, _nothing)
    _limit_files(resource.RLIM_INFINITY)


@contextlib.contextmanager
def _worker(name: str, directory: Path) -> Iterator[Setting]:
    faults: dict[str, Callable[[], object]] = {
        "hangs": threading.Event().wait,
        "always raises": lambda: 1 / 0,
    }
    backend: Any = Memory(faults.get(name, _nothing))
    yield backend, _fork if name == "process forks" else _nothing


FAULTS: dict[str, dict[str, Callable[[str, Path], contextlib.AbstractContextManager[Setting]]]] = {
    "mlflow": dict.fromkeys((HEALTHY, "down", "dies", "never answers", "answers 500", "answers 429"), _mlflow),
    "wandb": dict.fromkeys((HEALTHY, "wandb-core is killed", "server is unreachable"), _wandb),
    "tensorboard": dict.fromkeys(
        (HEALTHY, "log directory is removed", "log directory cannot be written", "disk is full, the journal's too"),
        _tensorboard,
    ),
    "any tracker": dict.fromkeys((HEALTHY, "hangs", "always raises", "process forks"), _worker),
}


def _in_a_process(tracker: str, name: str, steps: int) -> float:
    command = [sys.executable, "-m", __name__, tracker, name, str(steps), str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tracker}: {name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Train one run with one fault, and print the 99th percentile of its steps in seconds."""
    tracker, name, steps, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    with contextlib.ExitStack() as stack:
        # A tracker that is not waited for may still write there.
        directory = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        backend, strike = stack.enter_context(FAULTS[tracker][name](name, Path(directory)))
        manager = GradientManager(
            backends=[backend],
            grad_log_every_n_steps=1,
            run_dir=Path(directory) / "run",
            close_timeout_seconds=0.5,
            save_gradient_plots=False,
        )
        times = _train(manager, int(steps), strike)
        print(json.dumps(float(np.quantile(times, 0.99))), flush=True)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        manager.close()
    os._exit(0)  # what a broken tracker's package does at exit is not part of this


def _train(manager: GradientManager, steps: int, strike: Strike) -> list[float]:
    training, times = Training("mlp"), []
    for turn in range(-200, steps):
        if turn == -100:
            _await_first_words(manager)
            strike()
        training.optimizer.zero_grad()
        loss = training.forward()
        start = time.perf_counter()
        manager.step(training.model, training.optimizer, loss)
        elapsed = time.perf_counter() - start
        training.optimizer.step()
        if turn >= 0:
            times.append(elapsed)
    return times


def _await_first_words(manager: GradientManager) -> None:
    """Wait until the tracker has taken a row or failed to: loading its package is no fault."""
    end = time.monotonic() + _READY_SECONDS
    while time.monotonic() < end:
        (found,) = manager.status()["backends"].values()
        if found["acknowledged"] or found["why"]:
            return
        time.sleep(0.05)


def _nothing() -> None:
    """Leave everything as it is."""


def _kill_core() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        if "wandb-core" in child.name():
            child.kill()


def _put_in_the_way(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("in the way")


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _fork() -> None:
    """Leave a child with a copy of everything, as a worker of a DataLoader is."""
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)


if __name__ == "__main__":
    main()
