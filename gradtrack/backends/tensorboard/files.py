"""Event files of our own."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from gradtrack.backends.tensorboard.events import Events
from gradtrack.backends.tensorboard.framing import frame
from gradtrack.errors import BackendError

_file_numbers: Final = itertools.count()
_logger = logging.getLogger("gradtrack")


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
                "The journal keeps the records; make room or give the directory back."
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
