"""Records kept in a list, for tests and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

from gradtrack.backends.base import Backend
from gradtrack.errors import ClosedError
from gradtrack.records import Record


@final
class MemoryBackend(Backend):
    """A backend that keeps what it was given in `records`, the newest last."""

    inline: ClassVar[bool] = True

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = False
        self.failed = False

    def write(self, records: Sequence[Record]) -> None:
        if self.closed:
            raise ClosedError("memory backend: it is closed. Make a new one for another run.")
        self.records.extend(records)

    def close(self, *, failed: bool = False) -> None:
        if not self.closed:
            self.closed, self.failed = True, failed
