"""What all tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("gradtrack", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gradtrack")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in an empty directory and from one seed."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Take back what a tracker leaves in the environment for its own children: MLflow names its experiment there."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() | before.keys():
        if name.startswith(("MLFLOW_", "WANDB_")) and os.environ.get(name) != before.get(name):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
