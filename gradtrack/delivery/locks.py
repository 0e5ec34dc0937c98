"""Who may write: directories that belong to one run at a time, and forked copies that leave the run alone."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from gradtrack.support.names import file_part

if sys.platform != "win32":
    import fcntl


_logger = logging.getLogger("gradtrack")


def lock(handle: int, *, wait: bool = False) -> None:
    """Take the lock that ends with the open file; where the platform has none, other processes are not kept away."""
    if sys.platform != "win32":
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


class Claim:
    """A directory kept from other writers of this and every other process, until `release` or the process ends.

    `held` is False where another run has it; those of one `run_id` share it, since several backends of a run may
    write there. Where the platform or the file system has no locks, everybody has it.
    """

    _released = True  # until there is something to release: a signal may strike before

    def __init__(self, directory: Path, run_id: str = "") -> None:
        self.held = True
        self._key = (os.path.realpath(directory), run_id)
        self._lock = _locks.setdefault(self._key, _Lock()) if run_id else _Lock()
        self._guard = ForkGuard()
        self._guard.on_fork = self._lock.close  # without unlocking: the lock is one for a process and its copies
        self._released = False
        try:
            self._lock.take(directory, id(self))
        except OSError as fault:
            self.held = not isinstance(fault, BlockingIOError)
            self.release()

    def release(self) -> None:
        """Let others have the directory, whatever copies of this process there are."""
        if not self._released:
            if self._lock.unlock(id(self)):
                _locks.pop(self._key, None)
            self._released = True

    def __del__(self) -> None:
        self.release()


class _Lock:
    """The lock of an open directory, which knows no claim: a claim that is forgotten is gone at once."""

    def __init__(self) -> None:
        self._handle: int | None = None
        self._claims = set[int]()
        self._turn = threading.RLock()

    def take(self, directory: Path, claim: int) -> None:
        """Take it for a claim; a directory that is locked already is shared."""
        with self._turn:
            self._claims.add(claim)
            if self._handle is None and sys.platform != "win32":
                self._handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    lock(self._handle)
                except OSError:
                    self.close()
                    raise

    def unlock(self, claim: int) -> bool:
        """Let go of it with the last claim, and say whether that was the last."""
        with self._turn:
            self._claims.discard(claim)
            if self._claims:
                return False
            if self._handle is not None and sys.platform != "win32":
                with contextlib.suppress(OSError):
                    fcntl.flock(self._handle, fcntl.LOCK_UN)
            self.close()
            return True

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)


_locks: dict[tuple[str, str], _Lock] = {}


def claim_or_own(
    directory: Path, run_id: str, *, what: str, is_taken: Callable[[Path], bool] = lambda _: False
) -> tuple[Path, Claim]:
    """Claim a directory for a run, or where another run writes or has written to it, one of its own inside.

    The user is warned of that. If a directory cannot be created, the caller's first write raises the error.
    """
    own = own_directory(directory, run_id)
    for chosen in (own,) if own.is_dir() else (directory, own):  # where a replay finds what the run has begun
        with contextlib.suppress(OSError):
            chosen.mkdir(parents=True, exist_ok=True)
        claim = Claim(chosen, run_id)
        busy = (
            "is being written to by"
            if not claim.held
            else "has the files of"
            if chosen != own and is_taken(chosen)
            else ""
        )
        if not busy:
            break
        claim.release()
        _logger.warning(
            "%s %r %s another run: what belongs to run %s goes to %r. "
            "To keep runs apart by names of your own, give each a directory of its own.",
            what,
            str(directory),
            busy,
            run_id,
            str(own),
        )
    return chosen, claim


def is_same(directory: Path, run_dir: str | None) -> bool:
    """Say whether a directory is that of the run, which the run itself, or its replay, has claimed."""
    return run_dir is not None and os.path.realpath(directory) == os.path.realpath(run_dir)


def own_directory(directory: Path, run_id: str) -> Path:
    """Name the directory of a run inside of one that has another run."""
    return directory / file_part(run_id)


class Place(NamedTuple):
    """Where the ranks of a training keep what they are to be compared by, and the identity of that run."""

    directory: Path
    run_id: str


_PATIENCE_SECONDS: Final = 30.0
"""How long another rank waits for the directory of rank 0, which tells it at its own first step."""


def tell_place(run_dir: Path | None, place: Place, number: int) -> None:
    """Tell the other ranks the directory that rank 0 has for the manager with this number."""
    from gradtrack.gradients.distributed.agreement import tell_ranks

    asked = None if run_dir is None else str(run_dir)
    tell_ranks(f"run/{number}", json.dumps([asked, str(place.directory), place.run_id]))


def place_of_first(
    run_dir: Path | None, run_id: str, rank: int, number: int, *, resumed: bool
) -> tuple[Place | None, Claim | None]:
    """Return the directory that rank 0 has for the same run_dir; with another run_dir this rank locks its own."""
    from gradtrack.gradients.distributed.agreement import told_by_rank

    told = told_by_rank(f"run/{number}", _PATIENCE_SECONDS)
    if told is None:
        _logger.warning(
            "rank %d keeps no captures and no fingerprints, and is not compared with the others: rank 0 has not "
            "told its directory. Make the GradientManager on every rank, after init_process_group.",
            rank,
        )
        return None, None
    of_first, first, first_id = json.loads(told)
    if run_dir is None or str(run_dir) == of_first:
        return Place(Path(first), first_id), None
    is_taken = (lambda _: False) if resumed else _is_recorded
    directory, claim = claim_or_own(run_dir.absolute(), run_id, what="run_dir", is_taken=is_taken)
    return Place(directory, run_id), claim


def _is_recorded(directory: Path) -> bool:
    """Say whether a rank of an earlier run has left steps in a directory that rank 0 does not have."""
    return any(directory.glob("fingerprints-*")) or any(directory.glob("capture-*"))


_LONGEST_HOLD_SECONDS: Final = 5.0


class ForkGuard:
    """Knows whether this process is a forked copy of the one that made it, without asking the system."""

    def __init__(self) -> None:
        self.forked = False
        self._warned = False
        self.on_fork: Callable[[], object] = lambda: None
        """Called in a forked child, to let go of what it inherited."""
        _guards.add(self)

    def silent(self) -> bool:
        """Say whether nothing may be done here, and warn about it once."""
        if self.forked and not self._warned:
            self._warned = True
            _logger.warning("process %d is a fork of the one that records: it records nothing", os.getpid())
        return self.forked

    def enter_child(self) -> None:
        """Become silent; runs in the child before any of its own code."""
        self.forked = True
        self.on_fork()


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
