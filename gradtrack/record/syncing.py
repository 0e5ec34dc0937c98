"""Durability on a thread of its own, so that no training step waits for a disk."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Final

_POLL_SECONDS: Final = 0.02


class Syncer:
    """Makes an open file durable every few seconds, and at once when asked, without its writer waiting.

    Whoever writes to the file sets `dirty`. `unlinked` says that the file has no name any more, so that whatever is
    written to it is lost.
    """

    def __init__(self, interval_seconds: float) -> None:
        self._interval = interval_seconds
        self._handle: int | None = None
        self._retired: list[int] = []
        self.dirty = self._closing = self.unlinked = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, handle: int) -> None:
        """Take care of this open file from now on."""
        self._handle = handle
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradtrack-journal", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can start while the interpreter exits
                self._thread.start()

    def hurry(self) -> None:
        """Make what is there durable at once."""
        self._wake.set()

    def retire(self, handle: int) -> None:
        """Make an earlier file durable and close it."""
        self._retired.append(handle)
        self.dirty = True
        self._wake.set()

    def sync(self, timeout_seconds: float) -> None:
        """Wait until nothing is left to be made durable."""
        end = time.monotonic() + timeout_seconds
        self._wake.set()
        while self.dirty and self._alive() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)

    def close(self, handle: int, timeout_seconds: float) -> None:
        """Make the last file durable, close it and end."""
        self._handle, self._closing = None, True
        self.retire(handle)
        if self._thread is not None and self._alive():
            self._thread.join(timeout_seconds)
        else:
            self._settle()

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while not (self._closing and not self._retired):
            self._wake.wait(self._interval)
            self._wake.clear()
            if self.dirty:
                self._settle()

    def _settle(self) -> None:
        """Clear the mark first: a row that comes in between sets it again."""
        self.dirty = False
        with contextlib.suppress(OSError):
            if (handle := self._handle) is not None:
                os.fsync(handle)
                self.unlinked = is_unlinked(handle)
        while self._retired:
            handle = self._retired.pop()
            with contextlib.suppress(OSError):
                os.fsync(handle)
            with contextlib.suppress(OSError):
                os.close(handle)


def is_unlinked(handle: int) -> bool:
    """Say whether an open file was removed."""
    return os.fstat(handle).st_nlink == 0
