"""Backends and records for the tests of the delivery."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradtrack.backends.base import Backend
from gradtrack.records import Record, RunInfo

RUN = RunInfo(run_id="run-1", created=1.0, config={"max_grad_norm": 1.0}, environment={"python": "3"})
WAIT_SECONDS = 30.0
ROOT = Path(__file__).parents[2]


def row(step: int, **parts: Any) -> Record:
    """Make a record of one step."""
    metrics = parts.pop("metrics", {"train/grad_norm": float(step)})
    return Record(step=step, time=1_000.0 + step, metrics=metrics, **parts)


def in_child(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a few lines in a process of their own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def join_worker(backend: str) -> None:
    """Wait until the worker of a backend has ended; its thread bears the backend's name."""
    for thread in threading.enumerate():
        if thread.name == f"gradtrack-{backend}":
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive(), thread.name


class Recorder(Backend):
    """A backend that keeps what it was given, after doing whatever a test asks for first."""

    name = "recorder"

    def __init__(self, before: Callable[[Sequence[Record]], object] = lambda records: None) -> None:
        self.before = before
        self.records: list[Record] = []
        self.batches: list[int] = []
        self.flushes = 0
        self.closed: list[bool] = []
        self.changed = threading.Condition()

    def write(self, records: Sequence[Record]) -> None:
        """Keep the records."""
        self.before(records)
        with self.changed:
            self.records.extend(records)
            self.batches.append(len(records))
            self.changed.notify_all()

    def flush(self) -> None:
        """Count it."""
        self.flushes += 1

    def close(self, *, failed: bool = False) -> None:
        """Remember it."""
        self.closed.append(failed)

    def wait_for(self, count: int) -> None:
        """Wait until this many records came."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.records) >= count, WAIT_SECONDS)

    @property
    def steps(self) -> list[int]:
        """Return the steps in the order in which they came."""
        return [record.step for record in self.records]


class Gate:
    """Something that holds a backend back until a test opens it."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, records: Sequence[Record]) -> None:
        """Wait until the gate is open."""
        self.entered.set()
        assert self.opened.wait(WAIT_SECONDS)
