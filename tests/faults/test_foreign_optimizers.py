"""A skipped step is none for the optimizers of other packages, which count calls and average or decay weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
    assert len({name.partition("(")[0] for name in result["rested"]}) >= 300, result["left_out"]
    assert len(result["rested"]) >= 900, result["left_out"]
