"""Checksums of lines and of event files: CRC-32 by zlib, CRC-32C by NumPy; hashes of tensors, and the file of them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from gradtrack.errors import JournalError
from gradtrack.support.regular_files import MEBIBYTE, check_json, open_regular

if TYPE_CHECKING:
    from torch import Tensor

_POLYNOMIAL: Final = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
_SPAN: Final = 4096
_ALL_ONES: Final = 0xFFFFFFFF
_END: Final = re.compile(rb',"(crc32c?)":"([0-9a-f]{8})"\}')
_CHUNK: Final = 1 << 15  # so many that torch wakes no other thread for them
_MOST_BYTES: Final = 16 * 1024 * MEBIBYTE
_LONGEST_LINE: Final = 64 * MEBIBYTE
_ROW: Final = re.compile(rb'\{"step": ?(\d{1,15}), ?"source": ?("(?:[^"\\]|\\.){0,1000}")')
_BEGIN: Final = b'{"fingerprints":'
_NAMES: Final = re.compile(rb'\{"names": ?("(?:[^"\\]|\\.){0,1000}")')
_MOST_ROWS: Final = 1_000_000
_DEEPEST: Final = 32
_MOST_ENDS: Final = 16
"""The places tried as the end of a damaged line: each costs a checksum over all that precedes it."""
_LONGEST_END: Final = len(b',"crc32c":"00000000"}\n')


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of data, up to a span of bytes at once.

    The checksum is linear over XOR, so each byte adds what a table holds for its value and its distance from the end.
    """
    register = _ALL_ONES
    table, rows = _contributions(), _SPAN
    for start in range(0, len(data), _SPAN):
        piece = np.frombuffer(data, np.uint8, min(_SPAN, len(data) - start), start)
        places = piece + _row_starts()[rows - len(piece) :]
        head = min(4, len(piece))
        places[:head] ^= np.frombuffer(struct.pack("<I", register), np.uint8)[:head]
        carried = register >> 8 * len(piece) if len(piece) < 4 else 0
        register = int(np.bitwise_xor.reduce(table[places])) ^ carried
    return register ^ _ALL_ONES


@cache
def _contributions() -> NDArray[np.uint32]:
    """Return what a byte of each value adds to the register, for each distance from the end of a span."""
    last = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        last = np.where(last & 1, last >> 1 ^ np.uint32(_POLYNOMIAL), last >> 1)
    table = np.empty((_SPAN, 256), np.uint32)
    table[-1] = last
    for row in range(_SPAN - 1, 0, -1):
        table[row - 1] = table[row] >> 8 ^ last[table[row] & 255]
    return table.ravel()


@cache
def _row_starts() -> NDArray[np.int64]:
    return np.arange(0, _SPAN * 256, 256)


CHECKSUM: Final = "crc32"
"""The checksum that lines are written with; those of earlier journals may have the other one."""
_FUNCTIONS: Final[dict[bytes, Callable[[bytes], int]]] = {b"crc32": zlib.crc32, b"crc32c": crc32c}


def with_checksum(line: bytes) -> bytes:
    """Return a line that is a JSON object with the checksum of all that precedes it as its last entry."""
    body = line[:-2]
    return b'%b,"crc32":"%08x"}\n' % (body, zlib.crc32(body))


def is_intact(line: bytes) -> bool | None:
    """Say whether a line has the checksum that it ends with; None where it ends with none."""
    found = _END.search(line, max(len(line) - _LONGEST_END, 0))
    if found is None or found.end() + 1 != len(line) or not line.endswith(b"\n"):
        return None
    return _FUNCTIONS[found[1]](line[: found.start()]) == int(found[2], 16)


def intact_lines(damaged: bytes, start: bytes) -> list[bytes]:
    """Return the lines that are whole in one that is damaged, as where the end of a line was changed.

    Each begins with `start`, which no text within JSON contains, and ends with a checksum that matches. The last one
    may still be being written where nothing follows it.
    """
    begins = (found.start() for found in re.finditer(re.escape(start), damaged))
    lines = []
    for begin, end in pairwise(chain(begins, [len(damaged)])):
        for found in islice(_END.finditer(damaged, begin, end), _MOST_ENDS):
            line = damaged[begin : found.end()] + b"\n"
            if found.end() < len(damaged) and is_intact(line):
                lines.append(line)
                break
    return lines


def fingerprint(tensor: Tensor) -> tuple[str, float]:
    """Return the hash of the bits of a tensor, and its norm in float64."""
    import torch  # which a process that only delivers rows does without

    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).cpu()
    if not flat.numel():
        return hashlib.sha256().hexdigest()[:16], 0.0
    found = hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()[:16]  # type: ignore[arg-type, unused-ignore]
    numbers = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    squares = 0.0
    for start in range(0, numbers.numel(), _CHUNK):
        wide = numbers[start : start + _CHUNK].double().numpy()
        squares += float(np.square(wide).sum())
    return found, math.sqrt(squares)


def hash_of_batch(values: object) -> str:
    """Return the hash of what the tensors, arrays and numbers of a batch hold; of other things their type counts."""
    import torch

    found = hashlib.sha256()
    for leaf in _leaves(values):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            found.update(f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
        elif isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
            found.update(f"{leaf.dtype} {tuple(leaf.shape)} {fingerprint(leaf)[0]}".encode())
        else:
            plain = leaf is None or isinstance(leaf, (bool, int, float, str))
            found.update((repr(leaf) if plain else type(leaf).__qualname__).encode(errors="backslashreplace"))
    return found.hexdigest()[:16]


def _leaves(values: object, depth: int = 0) -> Iterator[object]:
    """Yield what is in nested containers, also in mappings and data classes that torch does not know."""
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves(values):
        inner: object = None
        if isinstance(leaf, Mapping):
            inner = list(leaf.values())
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            inner = [getattr(leaf, one.name, None) for one in dataclasses.fields(leaf)]
        if inner is None or depth >= _DEEPEST:
            yield leaf
        else:
            yield from _leaves(inner, depth + 1)


class SavedFingerprints:
    """The fingerprints in a file of a run directory; of a step that was made again after a resume, the last ones."""

    def __init__(self, path: Path, run_ids: Collection[str] | None = None) -> None:
        self._path, self._run_ids = path, run_ids
        self.rows: dict[tuple[str, int], tuple[int, int, tuple[str, int]]] = {}
        """Where the row of each step begins, and the names of its parameters; and run and number of its session."""
        self._offset = 0
        self._last_names: dict[str, int] = {}
        self._sessions: dict[str, tuple[str, int]] = {}

    def refresh(self) -> None:
        """Find the rows that were written since."""
        with self._opened() as stream:
            stream.seek(self._offset)
            for line in iter(lambda: stream.readline(_LONGEST_LINE), b""):
                if not line.endswith(b"\n"):
                    break
                start, self._offset = self._offset, self._offset + len(line)
                with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
                    if (found := _ROW.match(line)) and (source := json.loads(found[2])) in self._last_names:
                        session = self._sessions.get(source, ("", 0))
                        if self._run_ids is None or session[0] in self._run_ids:
                            self.rows[source, int(found[1])] = start, self._last_names[source], session
                    elif line.startswith(_BEGIN) and is_intact(line):
                        begin = json.loads(check_json(line))
                        self._sessions[str(begin["source"])] = str(begin["run_id"]), int(begin["session"])
                    elif found := _NAMES.match(line):
                        self._last_names[json.loads(found[1])] = start
                if len(self.rows) > _MOST_ROWS:
                    raise self._unread(f"more than {_MOST_ROWS:,} steps")

    def read(self, source: str, step: int) -> tuple[bytes, bytes] | None:
        """Return the lines of the row of a step and of the names of its parameters; None where one is damaged."""
        with self._opened() as stream:
            found = list[bytes]()
            for start in self.rows[source, step][:2]:
                stream.seek(start)
                line = stream.readline(_LONGEST_LINE)
                if not is_intact(line):
                    return None
                found.append(line)
        return found[0], found[1]

    def keep(self, wanted: Callable[[int, tuple[str, int]], bool]) -> None:
        """Forget all rows but those whose step and session are wanted."""
        self.rows = {key: place for key, place in self.rows.items() if wanted(key[1], place[2])}

    @contextlib.contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            with open_regular(self._path, most_bytes=_MOST_BYTES) as stream:
                yield stream
        except OSError as fault:
            raise self._unread(fault.strerror or fault) from None

    def _unread(self, reason: object) -> JournalError:
        return JournalError(
            f"{str(self._path)!r} cannot be read ({reason}): expected fingerprints of a run. "
            "Copy the run's directory again."
        )
