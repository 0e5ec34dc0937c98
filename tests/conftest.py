"""What all tests share."""

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
