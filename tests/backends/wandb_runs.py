"""Real offline runs of Weights & Biases, in this process and in programs of their own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradtrack.records import Record
from tests.processes import ROOT

NORM, STEP = "train/grad_norm", "gradtrack/step"


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep every run in the test's own directory, and leave none open."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    wandb: Any = importlib.import_module("wandb")
    wandb.setup().settings.root_dir = str(tmp_path)  # it asks the environment only once
    yield
    if wandb.run is not None:
        wandb.run.finish()


def open_run(**options: Any) -> Any:
    """Open a run as a user does."""
    wandb: Any = importlib.import_module("wandb")
    return wandb.init(project="tests", **options)


def file_of(run: Any) -> Path:
    """Return the directory of a run."""
    return Path(run.dir).parent


def ours(rows: list[dict[str, Any]], name: str = NORM) -> list[tuple[int, float]]:
    """Return (step, value) of one of our metrics, by its step."""
    return sorted((row[STEP], row[name]) for row in rows if STEP in row and name in row)


def expected(records: list[Record], name: str = NORM) -> list[tuple[int, float]]:
    """Return what the rows of a metric should be."""
    return [(record.step, record.metrics[name]) for record in records]


def run_program(program: str, *, returncode: int = 0, cwd: Path | None = None, **environment: str) -> str:
    """Run a program in a process of its own and return what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    # Without this the program would use the W&B process of these tests.
    inherited = {name: value for name, value in os.environ.items() if "WANDB_SERVICE" not in name}
    own = {"PYTHONPATH": str(ROOT), **environment}
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env={**inherited, **own})
    assert result.returncode == returncode, result.stderr
    assert "Traceback" not in result.stderr or returncode, result.stderr
    return result.stdout


def file_in(output: str) -> Path:
    """Return the directory of the run that a program printed on its last line."""
    return Path(output.strip().splitlines()[-1]).parent
