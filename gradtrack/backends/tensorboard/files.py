"""TensorBoard's event files: their framing with checksums, writing those of our own, and reading any."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from gradtrack.backends.tensorboard.events import STEP, Events, description_of
from gradtrack.errors import BackendError
from gradtrack.support.checksums import crc32c
from gradtrack.support.regular_files import is_regular

_logger = logging.getLogger("gradtrack")

_ALL_ONES: Final = 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """Return a payload as a record of an event file.

    TensorBoard's own writer takes the checksum byte by byte in Python: most of the time of a row.
    """
    length = struct.pack("<Q", len(payload))
    return b"".join((length, _checksum(length), payload, _checksum(payload)))


def _checksum(data: bytes) -> bytes:
    """Return the masked checksum of the file format."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & _ALL_ONES)


_file_numbers: Final = itertools.count()


class EventFile:
    """One event file in a directory of its own; a batch is in it as a whole or not at all."""

    def __init__(self, directory: Path, events: Events) -> None:
        # TensorBoard reads the files of a directory in the order of their names.
        order = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers):06d}"
        self.directory = directory
        self._path = directory / f"events.out.tfevents.{order}"
        self._events = events
        self._started = False

    def append(self, keyed: Iterable[tuple[object, Any]]) -> None:
        """Add events and hand them to the operating system."""
        found = [event.SerializeToString() for _, event in keyed]
        if not found:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as stream:
                self._append(stream, found)
        except OSError as fault:
            raise BackendError(
                f"tensorboard: {self._path.parent} cannot be written ({fault.strerror or fault}). "
                "Make room or give the directory back."
            ) from fault

    def _append(self, stream: Any, found: list[bytes]) -> None:
        end = stream.seek(0, os.SEEK_END)
        if end == 0:
            found = [self._events.first().SerializeToString(), *found]
            if self._started:
                _logger.warning("tensorboard: %s was removed; `gradtrack replay` brings back what it held", self._path)
        try:
            view = memoryview(b"".join(map(frame, found)))
            while view:
                view = view[stream.write(view) :]
        except OSError:
            stream.truncate(end)
            raise
        self._started = True


_Key = tuple[str, int, float]


class Index:
    """The records of a run in event files, which are read on as they grow: asking again costs only what is new.

    `reached` is the last step of each pair.
    """

    def __init__(self) -> None:
        self.reached: dict[str, int] = {}
        self._run_id = ""
        self._files: dict[Path, os.stat_result] = {}
        self._loaders: dict[Path, Any] = {}
        self._tags: dict[_Key, frozenset[str]] = {}
        self._known: dict[frozenset[str], frozenset[str]] = {}

    def read(self, directories: list[Path], run_id: str) -> dict[_Key, frozenset[str]]:
        """Return the tags of every record by its source, step and time."""
        files = {path: path.stat() for directory in directories for path in _files_in(directory)}
        if run_id != self._run_id or not all(_goes_on(known, files.get(path)) for path, known in self._files.items()):
            self._run_id, self._files, self._loaders, self._tags, self.reached = run_id, {}, {}, {}, {}
        for path in files:
            for event in self._loaders.setdefault(path, _loader(path)).Load():
                self._take(event)
        self._files = files
        return self._tags

    def _take(self, event: Any) -> None:
        for value in event.summary.value:
            if value.tag.startswith(STEP) and value.metadata.summary_description == description_of(self._run_id):
                key = value.tag.removeprefix(STEP).removeprefix("/"), event.step, event.wall_time
                tags = frozenset(value.tag for value in event.summary.value) | self._tags.get(key, frozenset())
                self._tags[key] = self._known.setdefault(tags, tags)
                self.reached[key[0]] = max(event.step, self.reached.get(key[0], event.step))


def read_tags(directory: Path, run_id: str) -> set[str]:
    """Find the tags that carry the identity of a run in the event files of a directory."""
    values = (value for event in _read(directory) for value in event.summary.value)
    return {value.tag for value in values if value.metadata.summary_description == description_of(run_id)}


def _read(directory: Path) -> Iterator[Any]:
    for path in _files_in(directory):
        yield from _loader(path).Load()


def _files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*tfevents*") if is_regular(path))


def _goes_on(known: os.stat_result, now: os.stat_result | None) -> bool:
    """Say whether a file is the one that was read, and not a new one in its place."""
    return now is not None and known.st_ino == now.st_ino and known.st_size <= now.st_size


def _loader(path: Path) -> Any:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return LegacyEventFileLoader(str(path))
