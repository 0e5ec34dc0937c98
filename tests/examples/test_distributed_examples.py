"""The examples of trainings on several processes run with two of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import ROOT, torchrun

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "options", "num_steps"),
    [("distributed_fsdp", ("--steps", "4"), 4), ("accelerate_script", (), 8), ("fabric_script", (), 8)],
)
def test_both_ranks_see_the_same_norms(name: str, options: tuple[str, ...], num_steps: int, tmp_path: Path) -> None:
    """Each rank has the same norm at every step, and the run leaves its files once."""
    pytest.importorskip({"accelerate_script": "accelerate", "fabric_script": "lightning"}.get(name, "torch"))
    launch = ("--redirects", "1", "--log-dir", str(tmp_path / "logs"))  # lines of two processes can run together
    script = str(ROOT / "examples" / f"{name}.py")
    result = torchrun(2, *launch, script, "--run-dir", str(tmp_path / "run"), *options, ACCELERATE_USE_CPU="true")
    assert result.returncode == 0, result.stderr[-3000:]
    logs = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    norms = [re.findall(r"step (\d+) norm (\S+)", log) for log in logs]
    assert [len(found) for found in norms] == [num_steps, num_steps]
    assert norms[0] == norms[1]
    assert (tmp_path / "run" / "run_end.json").is_file()
