"""The user's own SummaryWriter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradtrack.errors import BackendError, PermanentBackendError, UsageError


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
                self._add_histogram(value, event)
            elif value.metadata.plugin_data.plugin_name == "text":
                self._writer.add_text(value.tag, value.tensor.string_val[0].decode(), event.step, event.wall_time)
            elif value.HasField("simple_value"):
                self._writer.add_scalar(value.tag, value.simple_value, event.step, event.wall_time)

    def _add_histogram(self, value: Any, event: Any) -> None:
        found = value.histo
        self._writer.add_histogram_raw(
            value.tag,
            found.min,
            found.max,
            found.num,
            found.sum,
            found.sum_squares,
            list(found.bucket_limit),
            list(found.bucket),
            event.step,
            walltime=event.wall_time,
        )
