"""Directories that one run at a time writes to."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

from gradtrack.record.forks import ForkGuard
from gradtrack.record.naming import file_part

if sys.platform != "win32":
    import fcntl


_logger = logging.getLogger("gradtrack")


class Claim:
    """A directory kept from other writers of this and every other process, until `release` or the process ends.

    `held` is False where somebody else has it. Where the platform or the file system has no locks, everybody has it.
    """

    def __init__(self, directory: Path) -> None:
        self.held = True
        self._lock = _Lock()
        self._guard = ForkGuard()
        self._guard.on_fork(self._lock.close)  # without unlocking: the lock is one for a process and its copies
        try:
            self._lock.take(directory)
        except BlockingIOError:
            self.held = False
            self._lock.close()
        except OSError:
            self._lock.close()

    def release(self) -> None:
        """Let others have the directory, whatever copies of this process there are."""
        self._lock.unlock()

    def __del__(self) -> None:
        self.release()


class _Lock:
    """The lock of an open directory, which knows no claim: a claim that is forgotten is gone at once."""

    def __init__(self) -> None:
        self._handle: int | None = None

    def take(self, directory: Path) -> None:
        if sys.platform != "win32":
            self._handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self) -> None:
        if self._handle is not None and sys.platform != "win32":
            with contextlib.suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)


def claim_or_own(directory: Path, run_id: str, *, what: str) -> tuple[Path, Claim]:
    """Claim a directory for a run, or where another run is writing to it, one of its own inside, with a warning.

    A directory that cannot be made is left to whoever writes to it: he tells what is wrong.
    """
    own = own_directory(directory, run_id)
    for chosen in (directory, own):
        with contextlib.suppress(OSError):
            chosen.mkdir(parents=True, exist_ok=True)
        claim = Claim(chosen)
        if claim.held:
            break
        _logger.warning(
            "%s %r is being written to by another run: what belongs to run %s goes to %r. "
            "Close the other manager first, or give each run a directory of its own.",
            what,
            str(directory),
            run_id,
            str(own),
        )
    return chosen, claim


def own_directory(directory: Path, run_id: str) -> Path:
    """Name the directory of a run inside of one that another run writes to."""
    return directory / file_part(run_id)
