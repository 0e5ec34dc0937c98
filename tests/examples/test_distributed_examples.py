"""The examples of trainings on several processes run with two of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.backends.conftest import free_port
from tests.processes import ROOT, python, torchrun

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
    result = torchrun(2, *launch, script, "--run-dir", str(tmp_path / "run"), *options)
    assert result.returncode == 0, result.stderr[-3000:]
    logs = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    norms = [re.findall(r"step (\d+) norm (\S+)", log) for log in logs]
    assert [len(found) for found in norms] == [num_steps, num_steps]
    assert norms[0] == norms[1]
    assert (tmp_path / "run" / "run_end.json").is_file()


def test_accelerate_launch_starts_both_processes(tmp_path: Path) -> None:
    """The command of docs/frameworks/accelerate.md gives the norms of torchrun on both ranks, on the CPU too."""
    pytest.importorskip("accelerate")
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(free_port())]
    result = python(*launch, str(ROOT / "examples" / "accelerate_script.py"), "--run-dir", str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr[-3000:]
    norms = re.findall(r"rank (\d) step (\d+) norm (\d+\.\d+)", result.stdout)
    assert len(norms) == 16
    assert {one[1:] for one in norms if one[0] == "0"} == {one[1:] for one in norms if one[0] == "1"}
