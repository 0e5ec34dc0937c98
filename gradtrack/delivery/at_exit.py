"""The end of the interpreter: what runs first there, and managers that are still open."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradtrack.delivery.run import Sink


# A list, as a copy of one is made in one go, whatever other threads remember meanwhile.
_renewals: list[weakref.WeakMethod[Callable[[], None]]] = []


def remember(renew: Callable[[], None]) -> None:
    """Have `come_first` call this method as long as its object lives."""
    _renewals.append(weakref.WeakMethod(renew, _renewals.remove))


def come_first() -> None:
    """Let every manager close before what was registered so far: a tracker that was set up now must outlive its run.

    What is registered last runs first, and a package that a worker sets up registers its own end behind ours: a
    training that ends without a close would find it gone.
    """
    for found in _renewals[:]:
        renew = found()
        if renew is not None:
            renew()


class CloseAtExit:
    """Closes a manager's sink when the interpreter exits or the manager is collected, whichever comes first.

    It is registered again at the first record, and when a tracker has been set up. `unhook`, which takes off the hooks
    that are left, must not lead to the manager, since this keeps it.
    """

    def __init__(self, owner: Any, sink: Sink, unhook: Callable[[], object]) -> None:
        self._owner, self._sink, self.unhook = weakref.ref(owner), sink, unhook
        self._collected = weakref.finalize(owner, self._let_go)
        self._collected.atexit = False
        self.exiting = False
        """Whether the end of the interpreter has closed the manager, not its user."""
        atexit.register(self._exit)
        sink.on_open = self.renew
        remember(self.renew)

    def renew(self) -> None:
        """Run before everything that was registered so far."""
        if self._collected.alive:  # and in its old place as well: what is registered during the exit never runs
            atexit.register(self._exit)

    def cancel(self) -> None:
        """Do nothing any more."""
        self._collected.detach()
        atexit.unregister(self._exit)

    def _let_go(self) -> None:
        """End what a manager that was collected has begun."""
        atexit.unregister(self._exit)
        self.unhook()
        sink = self._sink
        if threading.current_thread().daemon:  # it may be one that the close waits for
            threading.Thread(target=sink.close, kwargs={"failed": False}, name="gradtrack-close").start()
        else:
            sink.close(failed=False)

    def _exit(self) -> None:
        owner = self._owner()
        if owner is not None:
            self.exiting = True
            # An exception that ended the program has been printed by now, and left its mark in sys.
            failed = getattr(sys, "last_type", None) is not None
            owner.close(failed=failed)
            self._sink.close(failed=failed)  # which an interrupt from the keyboard may have kept from being reached
