"""What must not be copied half done is finished before the process forks."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest

from gradtrack.delivery import locks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_waits_for_what_must_not_be_copied() -> None:
    """A temporary directory is removed by every copy of the process that exits; a copy made later knows none."""
    inside, tried = threading.Event(), threading.Event()
    kept: list[bool] = []

    def work() -> None:
        with locks.unforked(), tempfile.TemporaryDirectory() as directory:
            inside.set()
            tried.wait(0.3)
            kept.append(Path(directory).is_dir())

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10.0)
    if (child := os.fork()) == 0:
        os._exit(0 if kept == [True] else 1)
    tried.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_waits_no_longer_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """What never ends holds up no fork for good, and a copy can hold up its own forks."""
    monkeypatch.setattr(locks, "_LONGEST_HOLD_SECONDS", 0.05)
    inside, done = threading.Event(), threading.Event()

    def work() -> None:
        with locks.unforked():
            inside.set()
            done.wait(10.0)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10.0)
    if (child := os.fork()) == 0:
        with locks.unforked():
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    done.set()
    thread.join()
