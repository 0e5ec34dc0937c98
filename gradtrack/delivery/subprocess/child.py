"""The far end of a backend that works in a process of its own: it answers each request with one line of JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Final

from gradtrack.backends.base import Backend
from gradtrack.delivery.journal.codec import decode_row, decode_run, to_line
from gradtrack.delivery.status import describe
from gradtrack.delivery.subprocess.parent import ROOT
from gradtrack.errors import BackendError, GradtrackError
from gradtrack.records import Record, RunInfo

_COURTESY: Final = 10
"""How far behind the training the system puts this process: it gets a tenth of a core that both want."""
_GRACE_SECONDS: Final = 10.0
_WATCH_SECONDS: Final = 1.0
Request = tuple[dict[str, Any], list[Record]]


def main() -> None:
    """Serve the process that started this one until it closes the pipe or ends."""
    with contextlib.suppress(AttributeError, OSError):  # there is no such thing on Windows
        os.nice(_COURTESY)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a tracker prints must not come between the answers
    requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    greeting = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_receive, args=(sys.stdin.buffer, requests), daemon=True).start()
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    serve(greeting, iter(requests.get, None), answers)
    sys.stderr.flush()
    os._exit(0)  # an orderly end would wait for the thread that reads, which a copy of the training may keep waiting


def serve(greeting: Mapping[str, Any], requests: Iterator[Request], answers: BinaryIO) -> None:
    """Make the backend and get it ready, and answer each request; one that cannot be made is made at the next one."""
    log = _Log(greeting["level"])
    backend: Backend | None = None
    with contextlib.suppress(Exception):  # the first request tells what is wrong
        backend = _make(greeting)
        backend.prepare()
    for request, records in requests:
        answer: dict[str, Any] = {"value": None, "fault": None, "address": {}}
        try:
            backend = backend or _make(greeting)
            answer["value"] = _ACTIONS[request["do"]](backend, request, records)
        except BaseException as fault:  # also a tracker that exits: the training is told
            answer["fault"] = _name(fault), str(fault) if isinstance(fault, GradtrackError) else describe(fault)
        if backend is not None:
            with contextlib.suppress(Exception):
                answer["address"] = dict(backend.address())
        answers.write(to_line({**answer, "log": log.take()}))
        answers.flush()
        if request["do"] == "close":  # a forked copy of the training may hold the pipe open for long
            return


def _make(greeting: Mapping[str, Any]) -> Backend:
    found: Any = importlib.import_module(greeting["module"])
    for name in greeting["name"].split("."):
        found = getattr(found, name)
    backend: Backend = found(**greeting["options"])
    return backend


def _write(backend: Backend, request: Mapping[str, Any], records: list[Record]) -> None:
    backend.write(records)


def _present(backend: Backend, request: Mapping[str, Any], records: list[Record]) -> list[tuple[str, int]] | None:
    found = backend.present(records)
    return None if found is None else sorted(found)


def _flush(backend: Backend, request: Mapping[str, Any], records: list[Record]) -> None:
    backend.flush()


def _close(backend: Backend, request: Mapping[str, Any], records: list[Record]) -> None:
    backend.close(failed=request["failed"])


_ACTIONS: Final[dict[str, Callable[[Backend, Mapping[str, Any], list[Record]], Any]]] = {
    "write": _write,
    "present": _present,
    "flush": _flush,
    "close": _close,
}


def _name(fault: BaseException) -> str:
    """Name the exception of gradtrack that another process knows a fault by."""
    known = (kind.__name__ for kind in type(fault).__mro__ if kind.__module__ == GradtrackError.__module__)
    return next(known, BackendError.__name__)


def _receive(stream: BinaryIO, requests: queue.SimpleQueue[Request | None]) -> None:
    """Take requests in until the pipe is closed; then a write that is under way has a while to end."""
    with contextlib.suppress(ValueError):  # half a line, from a process that was killed
        for line in stream:
            request = json.loads(line)
            records = [decode_row(stream.readline(), ROOT, trusted=True)[1] for _ in range(request["rows"])]
            if records and "run" in request:
                records[0] = dataclasses.replace(records[0], run=_run(request["run"]))
            requests.put((request, records))
    _leave(requests)


def _run(values: Mapping[str, Any]) -> RunInfo:
    return dataclasses.replace(decode_run(values, ROOT), run_dir=values["run_dir"])


def _leave(requests: queue.SimpleQueue[Request | None]) -> None:
    requests.put(None)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


def _watch(parent: int) -> None:
    """End when the training is gone, even where a copy of it still holds the pipe open."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


class _Log(logging.Handler):
    """Keeps what gradtrack's logger is told, for the process whose log it belongs to."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self._kept: list[tuple[int, str]] = []
        logger = logging.getLogger("gradtrack")
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self._kept.append((record.levelno, record.getMessage()))

    def take(self) -> list[tuple[int, str]]:
        """Give out what came since the last time."""
        kept, self._kept = self._kept, []
        return kept
