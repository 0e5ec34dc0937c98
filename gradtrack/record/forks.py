"""Forked copies of a process, which must leave their parent's run alone."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable

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


_guards: weakref.WeakSet[ForkGuard] = weakref.WeakSet()


def _after_fork() -> None:
    for guard in list(_guards):
        guard.enter_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
