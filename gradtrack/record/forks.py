"""Forked copies of a process, which must leave their parent's run alone."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Final

_LONGEST_HOLD_SECONDS: Final = 5.0
_logger = logging.getLogger("gradtrack")


class ForkGuard:
    """Knows whether this process is a forked copy of the one that made it, without asking the system."""

    def __init__(self) -> None:
        self.forked = False
        self._warned = False
        self._release: Callable[[], object] | None = None
        _guards.add(self)

    def on_fork(self, release: Callable[[], object]) -> None:
        """Call this in a forked child, to let go of what it inherited."""
        self._release = release

    def silent(self) -> bool:
        """Say whether nothing may be done here, and warn about it once."""
        if self.forked and not self._warned:
            self._warned = True
            _logger.warning("process %d is a fork of the one that records: it records nothing", os.getpid())
        return self.forked

    def enter_child(self) -> None:
        """Become silent; runs in the child before any of its own code."""
        self.forked = True
        if self._release is not None:
            self._release()


@contextlib.contextmanager
def unforked() -> Iterator[None]:
    """Let no copy be made meanwhile: for what a copy would inherit half done, with its locks and temporary files.

    A fork in another thread waits for the end of it, though not longer than five seconds.
    """
    with _unforked:
        yield


_guards: weakref.WeakSet[ForkGuard] = weakref.WeakSet()
_unforked = threading.RLock()
_fork = threading.local()


def _before_fork() -> None:
    _fork.waited_out = _unforked.acquire(timeout=_LONGEST_HOLD_SECONDS)


def _after_fork_in_parent() -> None:
    if _fork.waited_out:
        _unforked.release()


def _after_fork_in_child() -> None:
    global _unforked
    _unforked = threading.RLock()
    for guard in list(_guards):
        guard.enter_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
