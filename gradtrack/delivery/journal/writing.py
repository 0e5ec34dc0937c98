"""Writes the journal: every recorded row on disk before a tracker is told of it, made durable by another thread."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gradtrack._version import __version__
from gradtrack.delivery.journal.codec import encode_row, encode_run, to_line
from gradtrack.delivery.journal.reading import FORMAT, read_rows
from gradtrack.delivery.locks import lock
from gradtrack.records import Record, RunInfo
from gradtrack.support.checksums import CHECKSUM, with_checksum
from gradtrack.support.interrupts import pass_on, start
from gradtrack.support.regular_files import open_regular

_POLL_SECONDS: Final = 0.02
_MARK_EVERY: Final = 128


class Syncer:
    """Makes an open file durable every few seconds, and at once when asked, without its writer waiting.

    The journal sets `dirty` with each row. `unlinked` says that the file has no name any more, so that whatever is
    written to it is lost.
    """

    def __init__(self, interval_seconds: float) -> None:
        self._interval = interval_seconds
        self._handle: int | None = None
        self._retired: list[int] = []
        self.dirty = self._closing = self._settling = self.unlinked = False
        self.wake = threading.Event()
        """Set it to make the rows in the file durable at once."""
        self._thread: threading.Thread | None = None

    def follow(self, handle: int) -> None:
        """Take care of this open file from now on."""
        self._handle = handle
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradtrack-journal", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can start while the interpreter exits
                start(self._thread)

    def retire(self, handle: int) -> None:
        """Make an earlier file durable and close it."""
        self._retired.append(handle)
        self.dirty = True
        self.wake.set()

    def sync(self, timeout_seconds: float) -> None:
        """Wait until nothing is left to be made durable."""
        end = time.monotonic() + timeout_seconds
        self.wake.set()
        while (self.dirty or self._settling) and self._alive() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)

    def close(self, handle: int, timeout_seconds: float) -> None:
        """Make the last file durable, close it and end."""
        self._handle, self._closing = None, True
        self.retire(handle)
        if self._thread is not None and self._alive():
            self._thread.join(timeout_seconds)
        else:
            self._settle()

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while not (self._closing and not self._retired):
            self.wake.wait(self._interval)
            self.wake.clear()
            if self.dirty:
                self._settle()

    def _settle(self) -> None:
        self._settling = True
        self.dirty = False  # first: a row that comes in between sets it again
        with contextlib.suppress(OSError):
            if (handle := self._handle) is not None:
                os.fsync(handle)
                self.unlinked = is_unlinked(handle)
        while self._retired:
            handle = self._retired.pop()
            with contextlib.suppress(OSError):
                os.fsync(handle)
            with contextlib.suppress(OSError):
                os.close(handle)
        self._settling = False


def is_unlinked(handle: int) -> bool:
    """Say whether an open file was removed."""
    return os.fstat(handle).st_nlink == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How large a journal may grow: the oldest parts go first."""

    part_bytes: int = 64 * 2**20
    total_bytes: int = 2**30
    sync_seconds: float = 3.0


@dataclass(eq=False, slots=True)
class _Part:
    """A file of a journal with the count of its rows; `marks` are numbers of rows in it and where these begin."""

    path: Path
    rows: int = 0
    marks: list[tuple[int, int]] = field(default_factory=list)


class Journal:
    """An append-only file of rows in parts, each row handed to the system before `append` returns.

    `append` never raises for a disk that is full or a directory that cannot be written: the row is counted in `failed`,
    the reason is in `fault`, and the next row tries again. So are the rows of a file that was removed.
    """

    def __init__(
        self,
        directory: Path,
        run: RunInfo,
        *,
        backends: Sequence[Mapping[str, Any]] = (),
        rank: int = 0,
        limits: Limits | None = None,
    ) -> None:
        self.directory, self.rank = directory, rank
        self.rows = self.failed = self.removed = 0
        self.fault: Exception | None = None
        self._run, self.backends = run, list(backends)
        self._limits = limits or Limits()
        self._parts: list[_Part] = []
        self._handle: int | None = None
        self._size = 0
        self.syncer = Syncer(self._limits.sync_seconds)
        self.sync = self.syncer.sync

    @property
    def parts(self) -> list[Path]:
        """Return the files of the journal, the one that is written to last."""
        return [part.path for part in self._parts]

    @property
    def path(self) -> Path | None:
        """Return the part that is written to, or the last one."""
        return self._parts[-1].path if self._parts else None

    def append(self, number: int, record: Record, *, urgent: bool = False) -> bool:
        """Write a row and say whether the journal has it; an urgent one is made durable at once, by another thread."""
        if self.syncer.unlinked:
            self._forget_removed()
        try:
            line = with_checksum(encode_row(number, record, self.directory))
            if self._handle is None or self._size + len(line) > self._limits.part_bytes:
                self._handle = self._rotate(number)
            part = self._parts[-1]
            if part.rows % _MARK_EVERY == 0:
                part.marks.append((number, self._size))
            try:
                _write_whole(self._handle, line, self._size)
                self._size += len(line)
            except BaseException:  # also what a signal raises, which may come between the two
                self._size = os.lseek(self._handle, 0, os.SEEK_END)
                raise
        except Exception as fault:  # also a row that holds what cannot be written down
            pass_on(fault)
            self.failed += 1
            self.fault = fault
            return False
        self.rows += 1
        part.rows += 1
        self.syncer.dirty = True
        if urgent:
            self.syncer.wake.set()
        return True

    def reread(self, start: int) -> Iterator[tuple[int, Record]]:
        """Yield the rows from a number on, as far as the journal still has them."""
        parts = list(self._parts)
        while len(parts) > 1 and parts[1].marks and parts[1].marks[0][0] <= start:
            parts.pop(0)
        for part in parts:
            offset = max((offset for number, offset in part.marks if number <= start), default=0)
            with contextlib.suppress(OSError):  # it was removed, by our bound or from outside
                for number, record in read_rows(part.path, offset=offset, trusted=True):
                    if number >= start:
                        yield number, record

    def close(self, timeout_seconds: float = 0.0) -> None:
        """Make the rows durable and let go of the file."""
        if self._handle is not None and is_unlinked(self._handle):
            self._forget_removed()
        handle, self._handle = self._handle, None
        if handle is not None:
            self.syncer.close(handle, timeout_seconds)

    def abandon(self) -> None:
        """Let go of the file in a forked child, without touching what the parent writes."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)

    def _rotate(self, number: int) -> int:
        """Begin a new part and return its handle; the old one is closed only when the new one has its header."""
        if self._handle is not None and is_unlinked(self._handle):  # or the new one would get its name
            self._forget_removed()
        path, handle = self._create()
        header = {
            "gradtrack_journal": FORMAT,
            "gradtrack": __version__,
            "part": len(self._parts) + self.removed,
            "first": number,
            "rank": self.rank,
            "pid": os.getpid(),
            "run": encode_run(self._run),
            "backends": self.backends,
            "checksum": CHECKSUM,
        }
        line = with_checksum(to_line(header))
        try:
            _write_whole(handle, line, 0)
        except BaseException:
            os.close(handle)
            path.unlink(missing_ok=True)
            raise
        self._parts.append(_Part(path))
        self.syncer.follow(handle)
        before, self._handle, self._size = self._handle, handle, len(line)
        if before is not None:
            self.syncer.retire(before)
        # The oldest parts go; a worker that misses one of their rows counts it as lost.
        while len(self._parts) > max(self._limits.total_bytes // self._limits.part_bytes, 2):
            with contextlib.suppress(OSError):
                self._forget(self._parts[0]).unlink()
        return handle

    def _create(self) -> tuple[Path, int]:
        """Make a file that no other process writes to, locked for as long as this process has it open."""
        self.directory.mkdir(parents=True, exist_ok=True)
        prefix = "journal-" if self.rank == 0 else f"journal-rank{self.rank}-"
        names = [found.stem.removeprefix(prefix) for found in self.directory.glob(f"{prefix}*.jsonl")]
        part = 1 + max((int(name) for name in names if name.isdecimal()), default=-1)
        while True:
            path = self.directory / f"{prefix}{part:03d}.jsonl"
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            except FileExistsError:
                part += 1
                continue
            with contextlib.suppress(OSError):
                lock(handle)
            return path, handle

    def _forget_removed(self) -> None:
        """Count the rows of files that were removed, and begin a new one with the next row."""
        if self._handle is not None:
            self.syncer.retire(self._handle)
            self._handle = None
        for part in [part for part in self._parts if not part.path.exists()]:
            self.fault = FileNotFoundError(errno.ENOENT, "the journal was removed", str(part.path))
            self.rows -= part.rows
            self.failed += part.rows
            self._forget(part)
        self.syncer.unlinked = False

    def _forget(self, part: _Part) -> Path:
        self._parts.remove(part)
        self.removed += 1
        return part.path


def is_being_written(path: Path) -> bool:
    """Say whether a process has a journal's part open for writing, or replays it."""
    with alone_with(path) as alone:
        return not alone


@contextlib.contextmanager
def alone_with(path: Path) -> Iterator[bool]:
    """Keep other processes from taking a journal's part, and say whether none had it."""
    with contextlib.ExitStack() as stack:
        try:
            lock(stack.enter_context(open_regular(path)).fileno())
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks
            pass
        yield True


def _write_whole(handle: int, line: bytes, size: int) -> None:
    """Write a whole line or none of it: what a full disk cut off is taken back."""
    try:
        written = os.write(handle, line)
        while written < len(line):
            written += os.write(handle, line[written:])
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, size)
        raise
