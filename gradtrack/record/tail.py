"""The tail of a journal: rows that are in the hands of the system, and not yet lines of it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from gradtrack.record.packed import ROW_BYTES, Terms, number_of, unpack_row
from gradtrack.record.syncing import is_unlinked
from gradtrack.records import Record

_FORMAT: Final = 1
_HEADER_BYTES: Final = 4096
CAN_BE_KEPT: Final = hasattr(os, "pwrite")
"""Whether the system can write into the middle of a file by one call."""
END: Final = _HEADER_BYTES + 4096 * ROW_BYTES
"""The position at which there is no room for a row any more."""


class Tail:
    """A file of fixed size that takes rows in one after the other, and begins anew when they are lines of the journal.

    Whoever reads it leaves out those rows. An error of the system is passed on.
    """

    def __init__(self, path: Path, run_id: str, rank: int) -> None:
        self.path = path
        self._run_id, self._rank = run_id, rank
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self.position = _HEADER_BYTES
        try:
            _reserve(self._handle, END)
        except BaseException:
            self.remove()
            raise

    def tell(self, terms: Sequence[Terms]) -> None:
        """Say what rows have in common; those that are there go on to name the same."""
        told = [found._asdict() for found in terms]
        header = {"gradtrack_tail": _FORMAT, "run_id": self._run_id, "rank": self._rank, "terms": told}
        line = json.dumps(header).encode("ascii")
        if len(line) >= _HEADER_BYTES:
            raise ValueError(f"the header of {self.path.name} takes {len(line)} bytes")
        os.pwrite(self._handle, line.ljust(_HEADER_BYTES - 1) + b"\n", 0)

    def put(self, row: bytes) -> None:
        """Hand a row to the system."""
        os.pwrite(self._handle, row, self.position)
        self.position += ROW_BYTES

    def rewind(self) -> None:
        """Use the room of the rows again."""
        self.position = _HEADER_BYTES

    @property
    def is_unlinked(self) -> bool:
        """Whether somebody has removed the file."""
        return is_unlinked(self._handle)

    def let_go(self) -> None:
        """Leave the file as it is, and write to it no more."""
        handle, self._handle = self._handle, -1
        with contextlib.suppress(OSError):
            os.close(handle)

    def remove(self) -> None:
        """Remove the file, whose rows are lines of the journal."""
        self.let_go()
        with contextlib.suppress(OSError):
            self.path.unlink()


def _reserve(handle: int, size: int) -> None:
    """Make sure of the room on the disk, where the system can."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.ftruncate(handle, size)


def read_tail(path: Path, run_id: str, rank: int, after: int) -> Iterator[tuple[int, Record]]:
    """Yield the rows of a tail, if it is that of a run, beyond a number."""
    try:
        content = path.read_bytes()
        header = json.loads(content[:_HEADER_BYTES])
        if header["gradtrack_tail"] != _FORMAT or (header["run_id"], header["rank"]) != (run_id, rank):
            return
        terms = [Terms(**found) for found in header["terms"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # nothing was put into it
        return
    yield from _rows(content, terms, after)


def _rows(content: bytes, terms: Sequence[Terms], after: int) -> Iterator[tuple[int, Record]]:
    before = -1
    for start in range(_HEADER_BYTES, len(content) - ROW_BYTES + 1, ROW_BYTES):
        row = content[start : start + ROW_BYTES]
        number = number_of(row)
        if number <= before:  # what is left of an earlier round
            return
        before = number
        if number > after:
            yield unpack_row(terms, row)
