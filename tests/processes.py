"""Processes of their own, with the package that is under test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gradtrack

ROOT = Path(gradtrack.__file__).parent.parent
WATCHDOG_SECONDS = 150


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python and return what it wrote and how it ended."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment)


def torchrun(num_processes: int, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in several processes that know of each other; a watchdog ends those that hang."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    with subprocess.Popen(
        [*command, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            out, errors = launcher.communicate(timeout=WATCHDOG_SECONDS)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # a launcher that is killed leaves its processes behind
            launcher.communicate(timeout=WATCHDOG_SECONDS)
            raise
    return subprocess.CompletedProcess(launcher.args, launcher.returncode, out, errors)
