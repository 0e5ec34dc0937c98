"""TensorBoard's event files: their framing, writing our own or through the user's SummaryWriter, and reading any."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gradtrack.backends.tensorboard.events import STEP, Events, description_of
from gradtrack.errors import BackendError, PermanentBackendError, UsageError
from gradtrack.support.checksums import crc32c
from gradtrack.support.regular_files import LONGEST_MESSAGE, check_message, is_regular, open_regular

_logger = logging.getLogger("gradtrack")

_file_numbers: Final = itertools.count()
_HEAD: Final = 12
_Key = tuple[str, int, float]


def frame(payload: bytes) -> bytes:
    """Return a payload as a record of an event file.

    TensorBoard's own writer takes the checksum byte by byte in Python: most of the time of a row.
    """
    length = struct.pack("<Q", len(payload))
    return b"".join((length, _checksum(length), payload, _checksum(payload)))


def _checksum(data: bytes) -> bytes:
    """Return the masked checksum of the file format."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class EventFile:
    """One event file in a directory of its own; a batch is in it as a whole or not at all."""

    def __init__(self, directory: Path, events: Events) -> None:
        # TensorBoard reads the files of a directory in the order of their names. W&B's sync_tensorboard takes a later
        # file, also one in a sub-directory, for the end of the user's own: no host begins with an underscore.
        order = f"{int(time.time()):010d}._gradtrack.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers):06d}"
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


class UserRun:
    """The user's own SummaryWriter: written to and flushed, never closed."""

    def __init__(self, writer: Any) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise UsageError(
                f"tensorboard: writer {type(writer).__name__}: expected a SummaryWriter. Pass the writer itself."
            )
        self._writer = writer
        self._taken: set[object] = set()
        found = getattr(writer, "log_dir", None) or getattr(writer, "logdir", None)
        self.directory = None if found is None else str(found)
        # Another package's writer has protocol buffers of its own and takes single values only.
        self.keeps_identity = type(writer).__module__.startswith("torch.")

    @property
    def closed(self) -> bool:
        """Whether the user has closed the writer: torch's would open a second file without a word."""
        return getattr(self._writer, "all_writers", self) is None

    def append(self, keyed: Sequence[tuple[object, Any]]) -> None:
        """Add events to the user's run; after a fault, those that are in it already are left out."""
        if not keyed:
            return
        if self.closed:
            raise PermanentBackendError(
                "tensorboard: the SummaryWriter was closed before gradtrack. "
                "Close the manager first; `gradtrack replay` delivers the records that came after."
            )
        try:
            for key, event in keyed:
                if key not in self._taken:
                    self._add(event)
                    self._taken.add(key)
            self._writer.flush()
        except Exception as fault:
            raise BackendError(f"tensorboard: the SummaryWriter failed ({fault!r}).") from fault
        self._taken.clear()

    def flush(self) -> None:
        """Flush the writer."""
        if not self.closed:
            self._writer.flush()

    def _add(self, event: Any) -> None:
        if self.keeps_identity:
            self._writer.file_writer.add_event(event, event.step, event.wall_time)
            return
        for value in event.summary.value:
            if value.HasField("histo"):
                found = value.histo
                sums = found.min, found.max, found.num, found.sum, found.sum_squares
                buckets = list(found.bucket_limit), list(found.bucket)
                self._writer.add_histogram_raw(value.tag, *sums, *buckets, event.step, walltime=event.wall_time)
            elif value.metadata.plugin_data.plugin_name == "text":
                self._writer.add_text(value.tag, value.tensor.string_val[0].decode(), event.step, event.wall_time)
            elif value.HasField("simple_value"):
                self._writer.add_scalar(value.tag, value.simple_value, event.step, event.wall_time)


class Index:
    """The records of a run in event files, which are read on as they grow: asking again costs only what is new."""

    def __init__(self) -> None:
        self.reached: dict[str, int] = {}
        """The last step of each pair."""
        self._run_id = ""
        self._files: dict[Path, os.stat_result] = {}
        self._ends: dict[Path, int] = {}
        self._tags: dict[_Key, frozenset[str]] = {}
        self._known: dict[frozenset[str], frozenset[str]] = {}

    def read(self, directories: list[Path], run_id: str) -> dict[_Key, frozenset[str]]:
        """Return the tags of every record by its source, step and time."""
        files = {path: path.stat() for directory in directories for path in _files_in(directory)}
        replaced = any(
            path not in files or files[path].st_ino != known.st_ino or files[path].st_size < known.st_size
            for path, known in self._files.items()
        )
        if run_id != self._run_id or replaced:
            self._run_id, self._files, self._ends, self._tags, self.reached = run_id, {}, {}, {}, {}
        for path in files:
            for event, end in read_events(path, self._ends.get(path, 0)):
                self._ends[path] = end
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
    found = itertools.chain.from_iterable(map(read_events, _files_in(directory)))
    values = (value for event, _ in found for value in event.summary.value)
    return {value.tag for value in values if value.metadata.summary_description == description_of(run_id)}


def _files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*tfevents*") if is_regular(path))


def read_events(path: Path, start: int = 0) -> Iterator[tuple[Any, int]]:
    """Yield the events of a file, each with where it ends, up to the first record that is not whole or is damaged.

    What takes too much memory or is no event comes as an empty one. TensorBoard's own reader asks for as many bytes as
    a record says that it has, and takes its checksum byte by byte in Python.
    """
    from tensorboard.compat.proto.event_pb2 import Event

    no_event = importlib.import_module("google.protobuf.message").DecodeError
    with open_regular(path) as stream:
        size, end = os.fstat(stream.fileno()).st_size, stream.seek(start)
        while len(head := stream.read(_HEAD)) == _HEAD and _checksum(head[:8]) == head[8:]:
            (length,) = struct.unpack_from("<Q", head)
            end += _HEAD + length + 4
            if end > size:
                return
            event = Event()
            if length > LONGEST_MESSAGE:
                _logger.warning("tensorboard: a record of %d bytes in %a is passed over", length, path.name)
                stream.seek(end)
            else:
                payload = stream.read(length)
                if stream.read(4) != _checksum(payload):
                    return
                with contextlib.suppress(no_event, ValueError):
                    event = Event.FromString(check_message(payload))
            yield event, end
