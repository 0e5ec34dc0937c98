"""Processes of their own, with the package that is under test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gradtrack

ROOT = Path(gradtrack.__file__).parent.parent


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python and return what it wrote and how it ended."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment)
