"""Real trackers for the tests of backends: started once, on loopback, and stopped at the end."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.stores import empty_store


def free_port() -> int:
    """Find a port of the loopback interface that is free, below those that connections take by themselves."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def served(store: Path, port: int) -> Iterator[str]:
    """Run an MLflow server on a store, and yield its address when it answers."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{store}"]
    command += ["--default-artifact-root", str(store.parent / "artifacts"), "--serve-artifacts"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (store.parent / "server.log").open("ab") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=store.parent, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _await_answer(server, address, store.parent / "server.log")
        yield address
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def _await_answer(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve one MLflow store to all tests."""
    pytest.importorskip("mlflow")
    directory = tmp_path_factory.mktemp("mlflow")
    store = directory / "store.db"
    shutil.copy(empty_store(), store)
    with served(store, free_port()) as address:
        yield address
