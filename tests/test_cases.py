"""The catalogue of what trackers, disks and processes do to a run: each case is a test that bears its number."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CASES = {
    1: "W&B, the user's run: the user logs with step= after our step",
    2: "W&B, the user's run: the user logs a validation with step=epoch",
    3: "W&B: a framework defines every metric by a star",
    4: "W&B: a framework writes train/grad_norm already",
    5: "our close leaves the user's run or writer open",
    6: "the user ends the run before us",
    7: "SIGKILL",
    8: "SIGTERM",
    9: "W&B's own process is killed",
    10: "W&B's server cannot be reached",
    11: "the MLflow server is down, dies, comes back",
    12: "the MLflow server accepts and never answers",
    13: "the MLflow server answers 500, 503, 429",
    14: "the disk is full",
    15: "the log directory is removed or cannot be written",
    16: "NaN, infinities and the ends of the float range",
    17: "one bad metric in a batch",
    18: "hostile metric names",
    19: "repeated, falling and impossible steps",
    20: "a fork",
    21: "an exit without close",
    22: "several ranks",
    23: "MLflow: no stray run, no change of address",
    24: "secrets",
    25: "hostile journals, configurations, plugins and names",
}
EACH_TRACKER = (5, 6, 7, 8, 14, 16, 20, 21)
"""The cases that every tracker has of its own."""


def named_after_cases() -> Iterator[tuple[int, str, str]]:
    """Yield number, file and name of every test that is named after a case."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_case_"):
                numbers = re.match(r"test_case_(\d\d(?:_and_\d\d)*)_", node.name)
                assert numbers, f"{path.name}: {node.name} has no number of two digits"
                for number in numbers[1].split("_and_"):
                    yield int(number), str(path.relative_to(TESTS)), node.name


def test_every_case_has_a_test() -> None:
    """No case is left out, and no number is made up."""
    assert {number for number, _, _ in named_after_cases()} == set(CASES)


@pytest.mark.parametrize("number", EACH_TRACKER)
def test_every_tracker_meets_the_case(number: int) -> None:
    """The case is tested with MLflow, with W&B and with TensorBoard, by parameters or in their own files."""
    for tracker in ("mlflow", "wandb", "tensorboard"):
        files = {file for found, file, _ in named_after_cases() if found == number}
        shared = {"faults/test_ends.py", "faults/test_processes.py"}
        assert files & shared or any(tracker in Path(file).name for file in files), (number, tracker, files)
