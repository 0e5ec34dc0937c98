"""Trainings in processes of their own, for the tests that end them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gradtrack import GradientManager
from gradtrack.backends.base import Backend
from gradtrack.delivery.journal.reading import find_journals
from gradtrack.records import Record
from tests.delivery.doubles import ROOT


class FileBackend(Backend):
    """A destination in a file, which a test reads after the process is gone."""

    name = "file"

    def __init__(self, path: Path) -> None:
        self.path = path

    def tell(self, line: str) -> None:
        """Add a line at once."""
        with self.path.open("a") as stream:
            stream.write(f"{line}\n")

    def write(self, records: Sequence[Record]) -> None:
        """Keep the steps."""
        for record in records:
            self.tell(str(record.step))

    def close(self, *, failed: bool = False) -> None:
        """Keep how it ended."""
        self.tell(f"closed failed={failed}")


class Loop:
    """A small training with a manager of its own."""

    def __init__(self, run_dir: str | Path, backends: Sequence[Any], **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        quick = {"grad_log_every_n_steps": 1, "close_timeout_seconds": 5.0, "engine": "torch"}
        quick["save_gradient_plots"] = False
        self.manager = GradientManager(backends=backends, run_dir=run_dir, **{**quick, **settings})

    def batch(self) -> torch.Tensor:
        """Return what goes in."""
        return torch.ones(4, 3)

    def run(self, steps: int) -> None:
        """Train for some steps."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(self.batch()).square().mean()
            self.manager.step(self.model, self.optimizer, loss)
            self.optimizer.step()


class UsualLoop(Loop):
    """A training of which most steps, and their rows, are usual ones."""

    def __init__(self, run_dir: str | Path, backends: Sequence[Any], **settings: Any) -> None:
        usual = {"engine": "native", "grad_track_per_weight_matrix": False, "max_grad_norm": 10.0}
        super().__init__(run_dir, backends, **{**usual, **settings})
        self.inputs = torch.randn(4, 3)
        self.optimizer.param_groups[0]["lr"] = 1e-4

    def batch(self) -> torch.Tensor:
        """Return numbers on both sides of zero."""
        return self.inputs


def run_script(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a training script to its end, whatever that is."""
    started = start_script(code, *arguments, **environment)
    out, err = started.communicate(timeout=120)
    return subprocess.CompletedProcess(started.args, started.returncode, out, err)


def start_script(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start a training script."""
    lead = "import os, signal, sys\nfrom pathlib import Path\nfrom tests.delivery.training import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", lead + code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def journaled_steps(run_dir: Path) -> list[int]:
    """Return the steps in the only journal of rank 0."""
    (journal,) = [found for found in find_journals(run_dir) if found.rank == 0]
    return [record.step for _, record in journal.rows()]
