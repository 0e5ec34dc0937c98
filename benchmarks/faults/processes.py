"""Processes for the rounds: forks of one that has loaded all packages, so that a round costs no second of imports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.faults.training import Plan, Told


class Running:
    """A training or a command that runs."""

    def __init__(self, pid: int, files: Mapping[str, Path], ended: threading.Event) -> None:
        self.code: int | None = None
        self._pid, self._files, self._ended = pid, files, ended

    @property
    def errors(self) -> str:
        return self._files["err"].read_text(errors="replace")

    @property
    def out(self) -> str:
        return self._files["out"].read_text(errors="replace")

    @property
    def told(self) -> list[list[Any]]:
        return Told.read(self._files["told"])

    def await_lines(self, count: int, seconds: float) -> bool:
        """Wait until the training has told so many lines, and say whether it runs still."""
        end, found, place = time.monotonic() + seconds, 0, 0
        with self._files["told"].open("rb") as stream:
            while found < count and not self._ended.is_set() and time.monotonic() < end:
                time.sleep(0.001)
                stream.seek(place)
                new = stream.read(65536).split(b"\0", 1)[0]
                found, place = found + new.count(b"\n"), place + len(new)
        return not self._ended.is_set()

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def join(self, seconds: float) -> int | None:
        """Wait for its end, and return its code, or None where the time is over."""
        return self.code if self._ended.wait(seconds) else None


class Processes:
    """Starts one process at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults.training"],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._started = 0

    def train(self, plan: Plan) -> Running:
        """Start a training."""
        Told.prepare(Path(plan.directory) / "told")
        return self._start({"plan": asdict(plan)}, Path(plan.directory))

    def command(self, words: list[str], directory: Path) -> Running:
        """Start a command of gradtrack's."""
        return self._start({"command": ["gradtrack", *words]}, directory)

    def close(self) -> None:
        """End them."""
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait()

    def _start(self, task: dict[str, Any], directory: Path) -> Running:
        self._started += 1
        files = {name: directory / f"{name}-{self._started}" for name in ("out", "err")}
        parent = self._parent
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(json.dumps({**task, **{name: str(path) for name, path in files.items()}}) + "\n")
        pid, ended = int(parent.stdout.readline()), threading.Event()
        running = Running(pid, {**files, "told": directory / "told"}, ended)

        def await_end() -> None:
            assert parent.stdout is not None
            running.code = int(parent.stdout.readline())
            ended.set()

        threading.Thread(target=await_end, daemon=True).start()
        return running
