"""The framing of event files against TensorBoard's own."""

from __future__ import annotations

import importlib
import io
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradtrack.backends.tensorboard import files
from gradtrack.backends.tensorboard.files import frame, read_events
from gradtrack.support.checksums import crc32c
from gradtrack.support.regular_files import check_message

record_writer = pytest.importorskip("tensorboard.summary.writer.record_writer")


@pytest.mark.parametrize(("data", "known"), [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA)])
def test_published_checksums(data: bytes, known: int) -> None:
    """The check value of CRC-32C and that of 32 zeros in RFC 3720."""
    assert crc32c(data) == known


@given(payload=st.binary(max_size=40), times=st.integers(1, 400))
@example(payload=b"\xff", times=4095)
@example(payload=b"\xff", times=4096)
@example(payload=b"\xff", times=4097)
@example(payload=b"\x80", times=2 * 4096 + 3)
def test_a_record_is_the_one_that_tensorboard_writes(payload: bytes, times: int) -> None:
    """Byte for byte, for payloads of any length."""
    stream = io.BytesIO()
    record_writer.RecordWriter(stream).write(payload * times)
    assert frame(payload * times) == stream.getvalue()


def event(step: int) -> bytes:
    """Return an event in its file's framing."""
    found: Any = importlib.import_module("tensorboard.compat.proto.event_pb2").Event(step=step)
    return frame(found.SerializeToString())


def steps_in(path: Path, start: int = 0) -> list[int]:
    """Read a file."""
    return [found.step for found, _ in read_events(path, start)]


def test_reading_goes_on_where_it_ended(tmp_path: Path) -> None:
    """A record that is torn is read when it is whole, and none is read twice."""
    path, whole = tmp_path / "events", event(1) + event(2)
    path.write_bytes(whole[:-3])
    ((found, end),) = read_events(path)
    assert (found.step, end) == (1, len(event(1)))
    path.write_bytes(whole + event(3))
    assert steps_in(path, end) == [2, 3]


def test_damage_ends_the_reading_and_no_event_is_empty(tmp_path: Path) -> None:
    """As in TensorBoard, which reads no further; a record with the right checksum need not be an event."""
    path = tmp_path / "events"
    path.write_bytes(event(1) + frame(b"\xff no event") + event(3) + event(4)[:-1] + b"x" + event(5))
    assert steps_in(path) == [1, 0, 3]
    path.write_bytes(event(1) + bytes(1000) + event(2))
    assert steps_in(path) == [1]


@pytest.mark.parametrize("length", [2**20, 49 * 2**30, 2**63, 2**64 - 1])
def test_record_of_any_length_is_not_read(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of 50 GB takes 4 KB on the disk, and its record all of the memory: what follows it is read."""
    monkeypatch.setattr(files, "LONGEST_MESSAGE", 2**19)
    header = struct.pack("<Q", length)
    with (tmp_path / "events").open("wb") as stream:
        stream.write(event(1) + header + files._checksum(header))
        if length < 2**60:
            stream.seek(length + 4, io.SEEK_CUR)
            stream.write(event(3))
        stream.truncate(50 * 2**30)
    assert steps_in(tmp_path / "events") == ([1, 0, 3] if length < 2**60 else [1])


def test_record_of_many_messages_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty value is two bytes in a file and a hundred in memory; what a row has is not taken for that."""
    monkeypatch.setattr(check_message, "__kwdefaults__", {"most_memory": 5 * 10**6})
    values = b"".join(b"\x0a\x22\x0a\x1btrain/grad_norm/layers.%04d\x15\0\0\x80\x3f" % at for at in range(2000))
    events = [b"\x10\x07\x2a" + varint(len(body)) + body for body in (values, b"\x0a\0" * 100_000)]
    (tmp_path / "events").write_bytes(b"".join(map(frame, events)))
    assert steps_in(tmp_path / "events") == [7, 0]


def varint(number: int) -> bytes:
    """Return a number as protobuf writes it."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)
