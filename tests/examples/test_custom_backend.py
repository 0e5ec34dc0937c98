"""The example of a backend installs and is then found by its name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
    import sys, torch
    from gradtrack import GradientManager
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"name": "csv", "path": "out.csv"}
    with GradientManager(backends=[options], grad_log_every_n_steps=1) as manager:
        for step in range(3):
            optimizer.zero_grad()
            manager.step(model, optimizer, model(torch.ones(2, 3)).mean())
            optimizer.step()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example into a directory of its own, without looking anything up."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    # Building leaves files beside the source, so a copy is built.
    source = tmp_path_factory.mktemp("source") / "custom_backend"
    shutil.copytree(ROOT / "examples" / "custom_backend", source)
    command += ["--target", str(target), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return target


def test_example_is_used_by_name(installed: Path, tmp_path: Path) -> None:
    """Naming the backend in the configuration is all that it takes."""
    environment = {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    lines = [line.split(",") for line in (tmp_path / "out.csv").read_text().splitlines()]
    assert [step for step, name, _ in lines if name == "train/grad_norm"] == ["1", "2", "3"]
    assert all(float(value) >= 0 for _, name, value in lines if name == "train/grad_norm")
