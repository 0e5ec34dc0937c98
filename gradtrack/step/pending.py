"""The pending ring of a pair: steps that were measured and protected, and of which the rest can wait.

On a CPU these are up to sixteen steps of the fast path, whose numbers are there at once; on an accelerator it is the
last step, whose numbers are copied without waiting. Both are applied to health, clipping, history and flight recorder
by the same `settle`: when the ring is full, when the next step is no fast one, or when one of these is to be read.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol, final


class RingEntry(Protocol):
    """Steps in the ring."""

    def settle(self) -> None:
        """Apply the steps to the other components; called again, go on after what an exception has ended."""


_rings: weakref.WeakSet[PendingSteps] = weakref.WeakSet()


@final
class PendingSteps:
    """Holds steps until they are settled. Reading a report settles nothing but the numbers of its own step."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a handler of a signal, or another thread, may settle
        self.is_taking = False
        """Whether a step is on its way into the ring, which a handler of a signal must not settle then."""
        self.held: RingEntry | None = None
        _rings.add(self)

    def hold(self, steps: RingEntry) -> None:
        """Hold steps, after those before them were settled."""
        self.settle()
        self.held = steps

    def settle(self) -> None:
        """Apply what is held, all in order."""
        with self.lock:
            held = self.held
            if held is not None and not self.is_taking:
                held.settle()
                self.held = None

    def enter_child(self) -> None:
        """Go on in a forked copy of the process, whose parent's threads may have held the lock."""
        self.lock, self.is_taking = threading.RLock(), False


def _enter_child() -> None:
    for ring in list(_rings):
        ring.enter_child()


if hasattr(os, "register_at_fork"):  # which Windows does not have
    os.register_at_fork(after_in_child=_enter_child)
