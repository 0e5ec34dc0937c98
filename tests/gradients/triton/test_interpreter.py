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
    "tests/protection/test_group_limits.py",
)


def run(*options: str) -> None:
    """Run the tests that name the engine, and fail with what they print."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton", *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_kernels_keep_the_laws_of_every_engine() -> None:
    """Statistics, counts, clipping and determinism, against float64 arithmetic and the other engines."""
    run("-m", "not slow", *_FILES)


@pytest.mark.slow
def test_the_kernels_keep_the_laws_on_more_examples() -> None:
    """Those of Hypothesis, four times as many."""
    run("-m", "not slow", "--hypothesis-profile=thorough", *_FILES)


@pytest.mark.slow
def test_many_elements() -> None:
    """Gradients of ten million elements, of each type."""
    run("-m", "slow", _FILES[0])
