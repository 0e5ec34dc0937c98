"""The tests of the Triton engine, in a process in which Triton's interpreter runs the kernels on the CPU."""

import os
import subprocess
import sys
from typing import Final

import pytest

from tests.processes import ROOT

_FILES: Final = (
    "tests/gradients/triton",
    "tests/gradients/test_measurer.py",
    "tests/gradients/test_deviations.py",
    "tests/protection/test_clipping.py",
)


def run(marks: str, *files: str) -> None:
    """Run the tests of these files that name the engine, and fail with what they print."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, "-k", "triton", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_kernels_keep_the_laws_of_every_engine() -> None:
    """Statistics, counts, clipping and determinism, against float64 arithmetic and the other engines."""
    run("not slow", *_FILES)


@pytest.mark.slow
def test_many_elements() -> None:
    """Gradients of ten million elements, of each type."""
    run("slow", _FILES[0])
