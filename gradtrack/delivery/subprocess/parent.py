"""A backend whose work is done by a process of its own, so that a tracker's package never holds the interpreter."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, final

from gradtrack.backends.base import Backend
from gradtrack.delivery.journal.codec import encode_row, encode_run, to_line
from gradtrack.errors import BackendError, ClosedError, PermanentBackendError
from gradtrack.records import Panel, Record, RunInfo
from gradtrack.support.interrupts import pass_on
from gradtrack.support.redact import redact

ROOT: Final = Path(os.sep)
_START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from gradtrack.delivery.subprocess.child import main; main()"
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
        self._run: RunInfo | None = None
        self._panels: dict[Panel, None] = {}
        self._files: dict[str, None] = {}
        self._last: Record | None = None
        self._knows_us = False
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Return the number of the process, or None where there is none."""
        return None if self._process is None else self._process.pid

    def prepare(self) -> None:
        """Start the process, without waiting for it; where it cannot start, the first write says why."""
        if self._process is None and not self._closed:
            with contextlib.suppress(BackendError):
                self._start()

    def write(self, records: Sequence[Record]) -> None:
        """Let the process write records."""
        for record in records:
            self._run = record.run or self._run
            self._panels.update(dict.fromkeys(record.panels))
            self._files.update(dict.fromkeys(record.files))
        self._ask("write", records)
        self._last = records[-1] if records else self._last

    def flush(self) -> None:
        """Let the process make everything durable."""
        if self._process is not None:
            self._ask("flush")

    def present(self, records: Sequence[Record]) -> set[tuple[str, int]] | None:
        """Let the process ask the destination."""
        self._run = next((record.run for record in records if record.run is not None), self._run)
        found = self._ask("present", records)
        return None if found is None else {(str(source), int(step)) for source, step in found}

    def before_end(self, deliver: Callable[[], object]) -> None:
        """Pass it to the near end of the backend, since the run is one of this process."""
        self._backend.before_end(deliver)

    def address(self) -> Mapping[str, Any]:
        """Return what the process said last, before that what is known here."""
        return self._address or self._backend.address()

    def close(self, *, failed: bool = False) -> None:
        """Let the process close its backend, and end it."""
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
        if records and not self._knows_us:
            records = [self._introduced(records[0]), *records[1:]]
        try:
            value = self._settle(self._exchange(what, records, parts))
            self._knows_us = self._knows_us or what == "write"
            return value
        except (OSError, ValueError) as fault:
            raise self._died(fault) from None

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

    def _settle(self, answer: Mapping[str, Any]) -> Any:
        """Pass on what the process has to say, and return what was asked for."""
        for level, text in answer["log"]:
            _logger.log(level, "%s", text)
        if answer["address"]:
            self._address = dict(answer["address"])
            self._backend.moved(self._address)
        if answer["fault"] is not None:
            kind, text = answer["fault"]
            raise _FAULTS.get(kind, BackendError)(text)
        return answer["value"]

    def _introduced(self, record: Record) -> Record:
        """Give a record what a new process cannot know."""
        panels = tuple(dict.fromkeys((*self._panels, *record.panels)))
        files = tuple(dict.fromkeys((*self._files, *record.files)))
        return dataclasses.replace(record, run=record.run or self._run, panels=panels, files=files)

    def _start(self) -> None:
        """Start the process; secrets among the options go through the pipe, where no list of processes shows them."""
        self._knows_us = False
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
        process, words = self._process, self._words
        code = None if process is None else _end(process)
        said = "" if words is None else last_words(words)
        self._end()
        how = redact(str(fault)) if code is None else f"it ended with {code}"
        return BackendError(f"the process that writes to the tracker is gone ({how}). {said}".rstrip())

    def _end(self) -> None:
        if self._process is not None:
            _end(self._process)
        if self._words is not None:
            self._words.close()
        self._process = self._words = None


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Let a process end by itself, or end it, and return its code."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        return process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    finally:
        process.stdout.close()


def last_words(stream: BinaryIO) -> str:
    """Return the end of what was written, its secrets hidden before it is cut: half an address is not known as one."""
    try:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(size - _READ_BACK, 0))
        words = stream.read().decode(errors="replace").split()
    except (OSError, ValueError):
        return ""
    return redact(" ".join(words[1:] if size > _READ_BACK else words))[-_LAST_WORDS:]
