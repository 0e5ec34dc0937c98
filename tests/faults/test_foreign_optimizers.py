"""A skipped step is none for optimizers of torch and others, which count calls and average or decay weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PINNED = (
    "pytorch_optimizer==4.1.0",
    "torch_optimizer==0.3.0",
    "pytorch_ranger==0.1.1",
    "schedulefree==1.4.1",
    "prodigyopt==1.1.2",
    "dadaptation==3.2",
    "timm==1.0.31",
    "heavyball==3.2.1",
)
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


@pytest.mark.slow
def test_no_foreign_optimizer_moves_on_a_skipped_step(tmp_path: Path) -> None:
    """Weights, groups and states of every one that trains here stay bitwise the same, and the next step is made."""
    packages, answer = tmp_path / "packages", tmp_path / "answer.json"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), *PINNED]
    subprocess.run(install, check=True, timeout=300)
    found = os.pathsep.join((str(packages), *sys.path))
    command = [sys.executable, "-m", "tests.faults.foreign_optimizers", str(answer)]
    environment = {**os.environ, "PYTHONPATH": found, "TORCHDYNAMO_DISABLE": "1"}  # heavyball would compile for minutes
    subprocess.run(command, check=True, timeout=1800, env=environment)
    result = json.loads(answer.read_text())
    assert result["moved"] == []
    assert counted(result["rested"]) == documented(), result["left_out"]
    assert documented()["all"][0] >= 300
    left_out = {entry.partition(": ")[0].partition("(")[0].rpartition(".")[2] for entry in result["left_out"]}
    assert left_out - set(re.findall(r"\w+", PAGE.read_text())) == set()


def counted(rested: list[str]) -> dict[str, tuple[int, int]]:
    """Return the numbers of optimizers and of settings of each package."""
    names = {entry.partition("(")[0] for entry in rested}
    optimizers = Counter(name.rpartition(".")[0] for name in names)
    settings = Counter(entry.partition("(")[0].rpartition(".")[0] for entry in rested)
    numbers = {package: (optimizers[package], settings[package]) for package in optimizers}
    return {**numbers, "all": (len(names), len(rested))}


def documented() -> dict[str, tuple[int, int]]:
    """Return what the page says of them."""
    rows = re.findall(r"^\| ([\w.]+)(?: [\d.]+)? \| (\d+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    return {package: (int(optimizers), int(settings)) for package, optimizers, settings in rows}
