"""Weights & Biases as a terminal shows it: a run's own file needs neither an account nor a server."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.text import Text

from pictures import runs, screens

_COLUMNS, _ROWS = 144, 37
_PATIENCE_SECONDS = 60
_PAUSE_SECONDS = 1.0
# What the keys do away with: whether a sidebar is there is W&B's own setting.
_SIDEBARS = {"System Metrics": "]", "Run Overview": "["}
_FILTER = ("/", "^train/grad_(norm|clip)", "Enter")


def photograph_wandb(directory: Path) -> Path:
    """Train with an offline run, open it in W&B's own terminal view and take a picture of that."""
    with TemporaryDirectory() as root:
        os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
        runs.faulty(Path(root) / "run", backends=[{"name": "wandb", "project": "exp1", "run_name": "faulty"}])
        (run,) = (Path(root) / "run" / "wandb").glob("offline-run-*")
        tool = Path(sys.executable).with_name("wandb")
        shown = in_a_terminal([str(tool), "leet", str(run)])
    return screens.photograph_terminal(shown, directory / "wandb.png", columns=_COLUMNS)


def in_a_terminal(command: Iterable[str]) -> Text:
    """Run W&B's terminal view, press keys until it shows the curves of the gradients only, and return the screen."""
    tmux = shutil.which("tmux")
    assert tmux is not None, "a picture of W&B's terminal view needs tmux"
    server = [tmux, "-L", f"gradtrack-{os.getpid()}", "-f", os.devnull]

    def call(*arguments: str) -> str:
        return subprocess.run([*server, *arguments], check=True, capture_output=True, text=True).stdout

    def screen() -> str:
        return call("capture-pane", "-p")

    def hide(name: str, key: str) -> bool:
        there = name in screen()
        if there:
            call("send-keys", key)
        return not there

    size = ("-x", str(_COLUMNS), "-y", str(_ROWS))
    call("new-session", "-d", *size, f"TERM=xterm-256color {shlex.join(command)}")
    try:
        _await(lambda: "Metrics [1" in screen())
        for name, key in _SIDEBARS.items():
            _await(lambda name=name, key=key: hide(name, key))  # type: ignore[misc]
        for key in _FILTER:
            call("send-keys", key)
            time.sleep(_PAUSE_SECONDS)
        _await(lambda: "filtered" in screen())
        time.sleep(_PAUSE_SECONDS)  # it draws a moment after it has said so
        return Text.from_ansi(call("capture-pane", "-e", "-p").rstrip())
    finally:
        call("kill-server")


def _await(is_there: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE_SECONDS
    while not is_there():
        assert time.monotonic() < end, "the terminal view shows nothing of the run"
        time.sleep(_PAUSE_SECONDS)
