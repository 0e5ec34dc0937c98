"""The end of the process: what runs first there, managers that are still open, and SIGTERM."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, final

from gradtrack.support.interrupts import start

if TYPE_CHECKING:
    from gradtrack.delivery.run import Sink


# By the identity of the reference: another thread, or a collection, may take one out while one is looked for, and a
# search through a list would then miss it. A copy of a dictionary is made in one go.
_renewals: dict[int, weakref.WeakMethod[Callable[[], None]]] = {}


def remember(renew: Callable[[], None]) -> None:
    """Have `come_first` call this method as long as its object lives."""
    reference = weakref.WeakMethod(renew, _forget)
    _renewals[id(reference)] = reference


def _forget(reference: weakref.WeakMethod[Callable[[], None]]) -> None:
    _renewals.pop(id(reference), None)


def come_first() -> None:
    """Let every manager close before what was registered so far: a tracker that was set up now must outlive its run.

    What is registered last runs first, and a package that a worker sets up registers its own end behind ours: a
    training that ends without a close would find it gone.
    """
    for found in _renewals.copy().values():
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


_TERM: Final = frozenset({signal.SIGTERM})


@final
class Termination:
    """Delivers what is queued when SIGTERM asks the process to end, as SLURM and Kubernetes do; then it ends.

    It takes the place of the system's default only: a handler of the program, set before or after, is left alone and
    does what it does. The signal reaches a thread by Python's wake-up descriptor, so that a process whose main thread
    waits in a collective ends as well. The training goes on beside the delivery, but for its next row.
    """

    def __init__(self) -> None:
        self._sinks: weakref.WeakSet[Sink] = weakref.WeakSet()
        self._pipe: tuple[int, int] | None = None
        self._held = False

    def add(self, sink: Sink) -> None:
        """Close this sink on SIGTERM, as long as it lives."""
        self._sinks.add(sink)
        if self._pipe is not None or sys.platform == "win32" or not _is_main():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before != -1:  # an event loop has it
            signal.set_wakeup_fd(before)
            os.close(reading)
            os.close(writing)
            return
        self._pipe = reading, writing
        start(threading.Thread(target=self._wait, args=(reading,), name="gradtrack-sigterm", daemon=True))
        signal.signal(signal.SIGTERM, self._handle)

    def remove(self, sink: Sink) -> None:
        """Leave a sink that has closed alone, and the signal to the system after the last one."""
        self._sinks.discard(sink)
        if not self._sinks and self._pipe is not None and _is_main():
            self._restore(self._pipe[1])

    def _restore(self, writing: int) -> None:
        self._pipe = None
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, writing):
            signal.set_wakeup_fd(before)
        os.close(writing)  # which ends the thread

    def hold(self) -> None:
        """Let the signal wait while the process forks: the copy still has the descriptor by which it reaches us."""
        self._held = self._pipe is not None and signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, _TERM)

    def let_go(self) -> None:
        """Let the signal come again."""
        if self._held:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERM)

    def leave(self) -> None:
        """Give a forked process, such as a worker of a data loader, the system's default again."""
        self._sinks.clear()
        if self._pipe is not None:
            self._restore(self._pipe[1])
        self.let_go()

    def _handle(self, _signum: int, _frame: FrameType | None) -> None:
        """Tell the thread, for a case in which an event loop has taken the wake-up descriptor since."""
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], bytes([signal.SIGTERM]))

    def _wait(self, reading: int) -> None:
        while signals := os.read(reading, 4096):
            if signal.SIGTERM in signals and signal.getsignal(signal.SIGTERM) == self._handle:
                for sink in list(self._sinks):
                    sink.terminate()
                ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # Python's own function is for the main thread
                os.kill(os.getpid(), signal.SIGTERM)
        os.close(reading)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


termination = Termination()
if sys.platform != "win32":
    os.register_at_fork(before=termination.hold, after_in_parent=termination.let_go, after_in_child=termination.leave)
