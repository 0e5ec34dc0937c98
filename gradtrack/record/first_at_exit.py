"""Who closes a run when the interpreter exits, and that he comes before the trackers' own packages."""

from __future__ import annotations

import weakref
from typing import Protocol


class Closer(Protocol):
    """Something that closes a run at the exit of the interpreter."""

    def renew(self) -> None:
        """Run before everything that was registered so far."""


# A list, as a copy of one is made in one go, whatever other threads remember meanwhile.
_closers: list[weakref.ref[Closer]] = []


def remember(closer: Closer) -> None:
    """Know of a closer as long as it lives."""
    _closers.append(weakref.ref(closer, _closers.remove))


def come_first() -> None:
    """Let every closer run before what was registered so far; a tracker that was set up now must outlive its run.

    What is registered last runs first, and a package that a worker sets up registers its own end behind ours: a
    training that ends without a close would find it gone.
    """
    for found in _closers[:]:
        closer = found()
        if closer is not None:
            closer.renew()
