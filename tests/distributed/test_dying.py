"""A rank that dies takes nothing with it: the others end with torch's error, and the journal is whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradtrack.delivery.journal.reading import find_journals
from gradtrack.delivery.replay import replay
from tests.backends.conftest import free_port
from tests.distributed import dying
from tests.processes import ROOT, WATCHDOG_SECONDS

pytestmark = pytest.mark.slow


def train(num_processes: int, directory: Path, how: str) -> list[int]:
    """Train in processes of which rank 1 dies, and return how they end; no launcher ends the others."""
    common = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_processes)}
    command = [sys.executable, "-m", dying.__name__, str(directory), how]
    ranks = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.DEVNULL)
        for rank in range(num_processes)
    ]
    try:
        return [process.wait(timeout=WATCHDOG_SECONDS) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.parametrize(("num_processes", "how", "code"), [(2, "killed", -9), (4, "killed", -9), (2, "raises", 3)])
def test_the_others_end_with_torchs_error_and_the_journal_is_whole(
    num_processes: int, how: str, code: int, tmp_path: Path
) -> None:
    """No rank hangs; rank 0 has each step before the fault on disk, and a tracker that has nothing gets all of it."""
    codes = train(num_processes, tmp_path, how)
    assert codes == [3, code, *[3] * (num_processes - 2)]
    for rank in (rank for rank in range(num_processes) if rank != 1):
        error = (tmp_path / f"error-{rank}.txt").read_text()
        assert not error.startswith("gradtrack")
        assert "RuntimeError" in error or "DistBackendError" in error or "DistNetworkError" in error
    journal = find_journals(tmp_path)[0]
    assert [record.step for _, record in journal.rows()] == list(range(1, dying.DIES_AT))
    done = replay(tmp_path, to="tensorboard", options={"log_dir": str(tmp_path / "again")})
    assert all(one.complete for one in done)
