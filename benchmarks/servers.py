"""MLflow servers on loopback, each in a process of its own: a real one, and one that has only faults."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FAULTY = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200 if self.path.endswith("/health") else int(sys.argv[2]))
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}" if self.command != "HEAD" else b"")
    do_GET = do_POST = do_HEAD = answer
    def log_message(self, *_): pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server listens, and its process."""

    address: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it as a crash does, with its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


def free_port() -> int:
    """Find a port of the loopback interface on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def mlflow_server(directory: Path) -> Iterator[Server]:
    """Serve a store of its own in a directory."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{directory}/store.db"]
    command += ["--default-artifact-root", str(directory / "artifacts"), "--host", "127.0.0.1", "--port", str(port)]
    with _started([*command, "--workers", "1"], port) as server:
        yield server


@contextlib.contextmanager
def faulty_server(status: int) -> Iterator[Server]:
    """Answer every request with a status, but for those about the server's health."""
    port = free_port()
    with _started([sys.executable, "-c", _FAULTY, str(port), str(status)], port) as server:
        yield server


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Accept connections and never answer."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def closed_port() -> Iterator[str]:
    """Hold a port on which every connection is refused."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@contextlib.contextmanager
def _started(command: list[str], port: int) -> Iterator[Server]:
    # The consumers of its job queue would keep the machine busy long after it answers.
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.address}/health", timeout=5):
                break
            time.sleep(0.1)
        else:
            raise RuntimeError(f"{command[1:4]} does not answer on port {port}")
        yield server
    finally:
        server.kill()
