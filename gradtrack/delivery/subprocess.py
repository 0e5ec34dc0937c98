"""A backend whose work is done by a process of its own, so that a tracker's package never holds the interpreter.

Both ends of the pipe: the training's process has a `ProcessBackend`, and the other one runs `main`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import logging.handlers
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, final

from gradtrack.backends.base import Backend, RunParts, address_of
from gradtrack.delivery.journal.codec import decode_row, decode_run, encode_row, encode_run, to_line
from gradtrack.delivery.status import describe
from gradtrack.errors import BackendError, ClosedError, GradtrackError, PermanentBackendError
from gradtrack.records import Record
from gradtrack.support.interrupts import pass_on
from gradtrack.support.redact import redact

ROOT: Final = Path(os.sep)
_START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from gradtrack.delivery.subprocess import main; main()"
)
_END_SECONDS: Final = 5.0
_FAULTS: Final = {fault.__name__: fault for fault in (BackendError, ClosedError, PermanentBackendError)}
_LAST_WORDS: Final = 300
_READ_BACK: Final = 16_384
_logger = logging.getLogger("gradtrack")


def outsourced(backend: Backend) -> Backend:
    """Return a backend that does the same work in a process of its own, or the backend itself where it must stay."""
    options = backend.portable()
    return backend if options is None or not sys.executable else ProcessBackend(backend, options)


@final
class ProcessBackend(Backend):
    """The near end of a backend that works in another process, from `prepare` or the first record to the close.

    Requests and answers are lines of JSON on its standard input and output. A process that dies is an error like any
    other of a tracker: the next attempt starts a new one and tells it what the old one knew.
    """

    def __init__(self, backend: Backend, options: Mapping[str, Any]) -> None:
        self._backend = backend
        self._greeting: dict[str, Any] = {
            "module": type(backend).__module__,
            "name": type(backend).__qualname__,
            "options": dict(options),
            "level": _logger.getEffectiveLevel(),
        }
        self._directory = Path.cwd()
        self._process: subprocess.Popen[bytes] | None = None
        self._words: BinaryIO | None = None
        self._address: dict[str, Any] = {}
        self._known = RunParts()
        """What a new process has to be told."""
        self._last: Record | None = None
        self._introduced = False
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Return the number of the process, or None where there is none."""
        return None if self._process is None else self._process.pid

    def prepare(self) -> None:
        if self._process is None and not self._closed:
            with contextlib.suppress(BackendError):  # the first write says why it cannot start
                self._start()

    def write(self, records: Sequence[Record]) -> None:
        self._known.take(records)
        self._ask("write", records)
        self._last = records[-1] if records else self._last

    def flush(self) -> None:
        if self._process is not None:
            self._ask("flush")

    def present(self, records: Sequence[Record]) -> set[tuple[str, int]] | None:
        self._known.run = next((record.run for record in records if record.run is not None), self._known.run)
        found = self._ask("present", records)
        return None if found is None else {(str(source), int(step)) for source, step in found}

    def before_end(self, deliver: Callable[[], object]) -> None:
        self._backend.before_end(deliver)

    def address(self) -> Mapping[str, Any]:
        return self._address or self._backend.address()

    def close(self, *, failed: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._process is not None and self._process.poll() is not None:
                self._end()
            if self._last is not None and self._process is None:
                self.present([self._last])  # a new process finds the run that the old one left open
            if self._process is not None:
                self._ask("close", failed=failed)
        finally:
            self._end()
            self._backend.close(failed=failed)

    def _ask(self, what: str, records: Sequence[Record] = (), **parts: Any) -> Any:
        if self._process is None:
            self._start()
        if records and not self._introduced:
            records = [self._known.added_to(records[0]), *records[1:]]
        try:
            answer = self._exchange(what, records, parts)
            for level, text in answer["log"]:
                _logger.log(level, "%s", text)
            if answer["address"]:
                self._address = dict(answer["address"])
                self._backend.moved(self._address)
            if answer["fault"] is not None:
                kind, text = answer["fault"]
                raise _FAULTS.get(kind, BackendError)(text)
        except (OSError, ValueError) as fault:
            raise self._died(fault) from None
        self._introduced = self._introduced or what == "write"
        return answer["value"]

    def _exchange(self, what: str, records: Sequence[Record], parts: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        run = next((record.run for record in records if record.run is not None), None)
        request = {"do": what, "rows": len(records), **parts}
        if run is not None:
            request |= {"run": encode_run(run)}
        process.stdin.write(to_line(request))
        process.stdin.writelines(encode_row(number, record, ROOT) for number, record in enumerate(records))
        process.stdin.flush()
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise BrokenPipeError("no answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> None:
        """Start the process; secrets among the options go through the pipe, where no list of processes shows them."""
        self._introduced = False
        paths = [path for path in list[object](sys.path) if isinstance(path, str)]
        try:
            self._words = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                cwd=self._directory if self._directory.is_dir() else ROOT,
                start_new_session=True,  # an interrupt from the keyboard is for the training alone
            )
            assert self._process.stdin is not None
            self._process.stdin.write(f"{json.dumps(paths)}\n".encode("ascii") + to_line(self._greeting))
            self._process.stdin.flush()
        except Exception as fault:  # whatever it is must not reach the training, which has begun here
            pass_on(fault)
            raise self._died(fault) from None

    def _died(self, fault: Exception) -> BackendError:
        """Say how the process ended, with its last words."""
        code, said = self._end()
        how = redact(str(fault)) if code is None else f"it ended with {code}"
        return BackendError(f"the process that writes to the tracker is gone ({how}). {said}".rstrip())

    def _end(self) -> tuple[int | None, str]:
        """Let the process end by itself, or end it, and return its code and its last words."""
        code, said, process = None, "", self._process
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                code = process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            process.stdout.close()
        if self._words is not None:
            said = last_words(self._words)
            self._words.close()
        self._process = self._words = None
        return code, said


def last_words(stream: BinaryIO) -> str:
    """Return the end of what was written, its secrets hidden before it is cut: half an address is not known as one."""
    try:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(size - _READ_BACK, 0))
        words = stream.read().decode(errors="replace").split()
    except (OSError, ValueError):
        return ""
    return redact(" ".join(words[1:] if size > _READ_BACK else words))[-_LAST_WORDS:]


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
    log: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()  # for the process whose log it belongs to
    _logger.setLevel(greeting["level"])
    _logger.propagate = False
    _logger.addHandler(logging.handlers.QueueHandler(log))
    backend: Backend | None = None
    with contextlib.suppress(Exception):  # the first request tells what is wrong
        backend = _make(greeting)
        backend.prepare()
    for request, records in requests:
        answer: dict[str, Any] = {"value": None, "fault": None}
        try:
            backend = backend or _make(greeting)
            answer["value"] = _act(backend, request, records)
        except BaseException as fault:  # also a tracker that exits: the training is told
            answer["fault"] = _name(fault), str(fault) if isinstance(fault, GradtrackError) else describe(fault)
        answer["address"] = {} if backend is None else address_of(backend)
        told = [log.get() for _ in range(log.qsize())]
        answer["log"] = [(found.levelno, found.getMessage()) for found in told]
        answers.write(to_line(answer))
        answers.flush()
        if request["do"] == "close":  # a forked copy of the training may hold the pipe open for long
            return


def _make(greeting: Mapping[str, Any]) -> Backend:
    found: Any = importlib.import_module(greeting["module"])
    for name in greeting["name"].split("."):
        found = getattr(found, name)
    backend: Backend = found(**greeting["options"])
    return backend


def _act(backend: Backend, request: Mapping[str, Any], records: list[Record]) -> list[tuple[str, int]] | None:
    match request["do"]:
        case "write":
            backend.write(records)
        case "flush":
            backend.flush()
        case "close":
            backend.close(failed=request["failed"])
        case _:
            found = backend.present(records)
            return None if found is None else sorted(found)
    return None


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
                run = dataclasses.replace(decode_run(request["run"], ROOT), run_dir=request["run"]["run_dir"])
                records[0] = dataclasses.replace(records[0], run=run)
            requests.put((request, records))
    requests.put(None)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


def _watch(parent: int) -> None:
    """End when the training is gone, even where a copy of it still holds the pipe open."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)
