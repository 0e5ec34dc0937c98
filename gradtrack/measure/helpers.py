"""Threads that stand by to help the calling thread with a piece of work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import final

Task = tuple[Callable[[], object], "SimpleQueue[None]"]


@final
class Helpers:
    """Daemon threads that run what they are given, and keep no exit and no forked child waiting."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0

    def lend(self, work: Callable[[], object], count: int) -> Iterator[None]:
        """Let this many threads run the work too; each step of the iterator waits until one is through.

        The work must do nothing when there is nothing left: a thread may come to it late, long after the
        caller went on.
        """
        finished: SimpleQueue[None] = SimpleQueue()
        if self._num_threads < count:
            self._grow(count)
        for _ in range(count):
            self._tasks.put((work, finished))
        return (finished.get() for _ in range(count))

    def _grow(self, count: int) -> None:
        with self._lock:
            while self._num_threads < count:
                threading.Thread(target=_serve, args=(self._tasks,), name="gradtrack-helper", daemon=True).start()
                self._num_threads += 1


def _serve(tasks: SimpleQueue[Task]) -> None:
    while True:
        work, finished = tasks.get()
        try:
            work()
        finally:
            finished.put(None)
            del work, finished  # what a waiting thread still names would stay alive


def helpers() -> Helpers:
    """Return the helpers of this process."""
    return _helpers


def _start_anew() -> None:
    global _helpers
    _helpers = Helpers()


_helpers = Helpers()
if hasattr(os, "register_at_fork"):  # which Windows has not
    os.register_at_fork(after_in_child=_start_anew)  # a fork copies the queue, but no thread
