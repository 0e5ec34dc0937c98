"""The example of a sharded training runs with two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_ranks_see_the_same_norms(tmp_path: Path) -> None:
    """Each rank has the same norm at every step, and the run leaves its files once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "distributed_fsdp.py"), "--run-dir", str(tmp_path / "run"), "--steps", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=150)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = re.findall(r"rank (\d) step (\d+) norm (\S+)", result.stdout)
    norms = {rank: [norm for owner, _, norm in sorted(lines) if owner == rank] for rank in "01"}
    assert len(norms["0"]) == 4
    assert norms["0"] == norms["1"]
    assert (tmp_path / "run" / "run_end.json").is_file()
