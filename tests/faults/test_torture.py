"""Random faults for half a minute, of the kinds that `make torture` goes on with for as long as it is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.processes import ROOT

pytest.importorskip("tensorboard")


def torture(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the harness to its end."""
    command = [sys.executable, "-m", "benchmarks.faults", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
def test_nothing_is_lost_doubled_or_raised() -> None:
    """Kills, killed replays, failing disks and interrupts leave every row once, and the weights of the training."""
    done = torture("--seconds", "30", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    total = next(line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["all"])
    assert int(total[1]) > 0
    assert total[-5:] == ["0"] * 5


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["lose a row", "write a row twice", "raise", "change a weight"])
def test_harm_is_found(harm: str) -> None:
    """A training that loses, doubles, raises or changes something makes the harness fail, and name the seed."""
    done = torture("--seconds", "0", "--seed", "3", "--kind", "disk: fsync", "--harm", harm)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^SEED=3 disk: fsync: ", done.stdout, flags=re.MULTILINE)
