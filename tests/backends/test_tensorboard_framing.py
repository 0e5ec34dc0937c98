"""The framing of event files against TensorBoard's own."""

import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradtrack.backends.tensorboard.files import frame
from gradtrack.support.checksums import crc32c

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
