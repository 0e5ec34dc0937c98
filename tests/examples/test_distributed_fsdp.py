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
    command += ["--redirects", "1", "--log-dir", str(tmp_path / "logs")]  # lines of two processes can run together
    command += [str(ROOT / "examples" / "distributed_fsdp.py"), "--run-dir", str(tmp_path / "run"), "--steps", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=150)
    assert result.returncode == 0, result.stderr[-3000:]
    logs = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    norms = [re.findall(r"step (\d+) norm (\S+)", log) for log in logs]
    assert [len(found) for found in norms] == [4, 4]
    assert norms[0] == norms[1]
    assert (tmp_path / "run" / "run_end.json").is_file()
