"""What ranks must have in common, seen from one that is alone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from gradtrack.errors import UsageError
from gradtrack.gradients.distributed.agreement import agree


@pytest.fixture
def _alone(tmp_path: Path) -> Iterator[None]:
    """Be the only rank of a group whose timeout is a second."""
    options = {"rank": 0, "world_size": 1, "timeout": timedelta(seconds=1)}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", **options)  # type: ignore[arg-type]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_nobody_waits_longer_than_the_groups_do() -> None:
    """A rank that has died before its first look ends the others after the timeout that the loop has set."""
    with pytest.raises(UsageError, match="rank 1 did not show its gradients within 1 seconds"):
        agree((0, 1), {"step": 1})
