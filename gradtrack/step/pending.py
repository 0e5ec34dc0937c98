"""The pending ring of a pair: steps that are measured and protected, and not applied to the other components yet.

On a CPU these are up to sixteen steps of the fast path, whose numbers are known at once; on an accelerator it is the
last step, whose numbers are copied without waiting. The same `settle` applies both to health, clipping, history and
flight recorder: when the ring is full, before a step outside the fast path, or before any of these is read.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol, final


class RingEntry(Protocol):
    """Steps in the ring."""

    def settle(self) -> None:
        """Apply the steps to the other components; after an exception a second call continues with the rest."""


_rings: weakref.WeakSet[PendingSteps] = weakref.WeakSet()


@final
class PendingSteps:
    """The steps of a pair that are not settled yet. Reading a report settles only the numbers of its own step."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler, or another thread, may settle
        self.is_taking = False
        """Whether a step is being added, during which a signal handler must not settle the ring."""
        self.held: RingEntry | None = None
        _rings.add(self)

    def hold(self, steps: RingEntry) -> None:
        """Add steps to the ring, after settling those before them."""
        self.settle()
        self.held = steps

    def settle(self) -> None:
        """Apply the pending steps, in order."""
        with self.lock:
            held = self.held
            if held is not None and not self.is_taking:
                held.settle()
                self.held = None

    def enter_child(self) -> None:
        """Make a new lock in a forked process, since a thread of the parent may have held the old one."""
        self.lock, self.is_taking = threading.RLock(), False


def _enter_child() -> None:
    for ring in list(_rings):
        ring.enter_child()


if hasattr(os, "register_at_fork"):  # which Windows does not have
    os.register_at_fork(after_in_child=_enter_child)
