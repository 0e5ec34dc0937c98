"""The framing of TensorBoard's event files: a length and a payload, each with its checksum."""

from __future__ import annotations

import struct
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL: Final = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
_SPAN: Final = 4096
_ALL_ONES: Final = 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """Return a payload as a record of an event file.

    TensorBoard's own writer takes the checksum byte by byte in Python: most of the time of a row.
    """
    length = struct.pack("<Q", len(payload))
    return b"".join((length, _checksum(length), payload, _checksum(payload)))


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


def _checksum(data: bytes) -> bytes:
    """Return the masked checksum of the file format."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & _ALL_ONES)


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
