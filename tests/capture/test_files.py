"""The files of a capture: the safetensors format, nested values, and readers that trust nothing."""

from __future__ import annotations

import json
import os
import struct
from collections import UserDict, namedtuple
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gradtrack.capture.files import TENSORS, VALUES, Batch, CaptureValues, Encoder, SavedCapture, write_capture
from gradtrack.errors import CaptureError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16),
]
Pair = namedtuple("Pair", "left right")


@dataclass
class Sample:
    """A batch as some libraries have it."""

    x: Tensor
    size: int


def values_of(batch: Any) -> CaptureValues:
    """Return the values of a capture that has one batch."""
    return CaptureValues(step=3, reason="nonfinite", model="M", parameters=[], buffers=[], batches=[Batch(batch=batch)])


def written(directory: Path, tensors: dict[str, Tensor], batch: Any = None) -> Path:
    """Write a capture, and return its directory."""
    return write_capture(directory, "capture-00003", tensors, values_of(batch))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Return a tensor of any type that the format has, with any bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = int(np.prod(shape)) * dtype.itemsize
    content = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        content = bytearray(byte & 1 for byte in content)
    return torch.frombuffer(content, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """Return what two equal tensors have in common."""
    flat = tensor.contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@given(named=st.dictionaries(st.text(min_size=1, max_size=5), tensors(), max_size=4))
def test_the_format_is_that_of_safetensors(named: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is written can be read by the safetensors package, and the other way round, bit by bit."""
    directory = tmp_path_factory.mktemp("files")
    named.pop("__metadata__", None)
    found = written(directory, named)
    theirs = load_file(found / TENSORS)
    assert {name: bits(one) for name, one in theirs.items()} == {name: bits(one) for name, one in named.items()}
    save_file(named, found / TENSORS, metadata={"format": "pt"})
    with closing(SavedCapture(found)) as ours:
        assert {name: bits(ours.tensor(name)) for name in named} == {name: bits(one) for name, one in named.items()}


def test_nested_values_come_back(tmp_path: Path) -> None:
    """Containers of the usual kinds keep their order, their keys, and the layout of their tensors."""
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.zeros(1, 2)])
    batch = [
        {"x": x, 7: (x, [None, True, 2, 0.5, float("nan"), "text"])},
        Pair(torch.ones(2, requires_grad=True), np.arange(3, dtype=np.float32)),
        Sample(torch.zeros(1), 4),
        UserDict({"ids": torch.arange(3)}),
        np.float64(2.5),
        packed,
    ]
    encoder = Encoder()
    encoded = encoder.encode(batch, "batch")
    assert not encoder.lost
    with closing(SavedCapture(written(tmp_path, encoder.tensors, encoded))) as opened:
        found = opened.decode(opened.values.batches[0].batch)
    assert found[0]["x"].stride() == x.stride()
    assert torch.equal(found[0]["x"], x)
    assert repr(found[0][7][1]) == "[None, True, 2, 0.5, nan, 'text']"
    assert found[1].left.requires_grad
    assert found[1].right.tolist() == [0, 1, 2]
    assert (found[2].size, found[3]["ids"].tolist(), found[4]) == (4, [0, 1, 2], 2.5)
    assert torch.equal(found[5].data, packed.data)


def test_a_value_that_is_not_kept_is_named(tmp_path: Path) -> None:
    """It is said when the capture is written, and again where it is needed."""
    encoder = Encoder()
    encoded = encoder.encode((torch.ones(1), object(), torch.eye(3).to_sparse()), "batch")
    assert list(encoder.lost) == ["builtins.object", "torch.Tensor"]
    with (
        closing(SavedCapture(written(tmp_path, encoder.tensors, encoded))) as opened,
        pytest.raises(CaptureError, match=r"builtins\.object, which a capture does not keep.*Pass such a batch"),
    ):
        opened.decode(opened.values.batches[0].batch)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of a file of tensors, and what follows it."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [4]},
        {"shape": [-3, -1]},
        {"shape": [2**62, 2**62]},
        {"shape": "3"},
        {"dtype": "F99"},
        {"data_offsets": [4, 16]},
        {"data_offsets": [0, 2**40]},
        {"data_offsets": [0]},
        {"shape": [1] * 65 + [3]},
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """No place or size in the file is trusted."""
    directory = written(tmp_path, {"a": torch.ones(3)})
    header, rest = header_of(directory / TENSORS)
    header["a"] |= change
    text = json.dumps(header).encode()
    (directory / TENSORS).write_bytes(struct.pack("<Q", len(text)) + text + rest)
    with pytest.raises(CaptureError, match=r"cannot be read .*Copy the whole directory again"):
        SavedCapture(directory)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", struct.pack("<Q", 2**62) + b"{}"])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, content: bytes) -> None:
    """So is one that is none of this format."""
    directory = written(tmp_path, {"a": torch.ones(3)})
    (directory / TENSORS).write_bytes(content)
    with pytest.raises(CaptureError, match="cannot be read"):
        SavedCapture(directory)


@pytest.mark.parametrize("name", [TENSORS, VALUES])
def test_links_and_pipes_are_not_followed(tmp_path: Path, name: str) -> None:
    """A directory that another person made may hold a link to any file of the user, or a pipe that never ends."""
    directory = written(tmp_path, {"a": torch.ones(3)})
    elsewhere = tmp_path / "elsewhere"
    (directory / name).rename(elsewhere)
    (directory / name).symlink_to(elsewhere)
    with pytest.raises(CaptureError, match="symbolic link"):
        SavedCapture(directory)
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(CaptureError, match="not a regular file"):
        SavedCapture(directory)


def test_a_file_above_the_bound_is_not_read(tmp_path: Path) -> None:
    """A sparse file takes no disk, and would take all memory."""
    directory = written(tmp_path, {"a": torch.ones(3)})
    os.truncate(directory / TENSORS, 2**36)
    with pytest.raises(CaptureError, match="more than 4000000000 bytes"):
        SavedCapture(directory)


def test_a_tensor_that_is_named_often_is_read_once(tmp_path: Path) -> None:
    """A small file of values could name a large tensor thousands of times, which all would take memory."""
    directory = written(tmp_path, {"a": torch.arange(1000.0)})
    with closing(SavedCapture(directory, most_bytes=50_000)) as opened:
        named = {"list": [[index, {"tensor": "a"}] for index in range(10)]}
        found = opened.decode(named)
        assert len({one.data_ptr() for one in found}) == 1
        assert torch.equal(found[-1], torch.arange(1000.0))
        strided = {"list": [[index, {"tensor": "a", "stride": [1]}] for index in range(1000)]}
        with pytest.raises(CaptureError, match="more than 50000 bytes"):
            opened.decode(strided)


@pytest.mark.parametrize("umask", [0o077, 0o022])
def test_the_umask_says_who_may_read_it(tmp_path: Path, umask: int) -> None:
    """A capture holds the raw batch."""
    before = os.umask(umask)
    try:
        directory = written(tmp_path, {"a": torch.ones(3)})
    finally:
        os.umask(before)
    assert directory.stat().st_mode & 0o777 == 0o777 & ~umask
    assert (directory / TENSORS).stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_state_of_numpy_that_points_outside_is_refused() -> None:
    """NumPy would read memory that is not its own."""
    from gradtrack.capture.operations import checked_numpy_state

    name, keys, _, *rest = np.random.get_state()
    with pytest.raises(ValueError, match="random numbers"):
        checked_numpy_state((name, keys, 10**6, *rest))
