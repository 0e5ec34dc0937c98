"""The files of a capture, written whole or not at all: tensors in the safetensors format, everything else as JSON."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import re
import secrets
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, FailFast, ValidationError
from torch import Tensor, nn

from gradtrack.errors import CaptureError
from gradtrack.gradients.distributed.shards import is_distributed
from gradtrack.support.names import listed
from gradtrack.support.regular_files import MEBIBYTE, check_json, open_regular, read_inside

TENSORS: Final = "tensors.safetensors"
VALUES: Final = "capture.json"
MOST_BYTES: Final = 4 * 10**9
"""The largest capture that is read unless the reader allows more."""
_MOST_JSON: Final = 64 * MEBIBYTE
_MOST_MEMORY: Final = 256 * MEBIBYTE
_MOST_DIMENSIONS: Final = 64
_MOST_ENTRIES: Final = 100_000
_DEEPEST: Final = 32
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_T = TypeVar("_T")
_Listed = Annotated[list[_T], FailFast()]  # pydantic else collects every fault: a million of them fill the memory


class Forward(BaseModel):
    """One forward pass of a capture: its inputs, and what was set when it began."""

    inputs: Any
    """The positional and the keyword arguments, encoded; None where no hook has seen the call."""
    rng: Any
    autocast: dict[str, str] = {}
    changed: bool = False
    """Whether an input was written to between the forward pass and the capture."""


class Batch(BaseModel):
    """What one backward pass of a capture was made from: the batch that was passed, and the forward passes."""

    batch: Any
    forwards: _Listed[Forward] = []


class CaptureValues(BaseModel):
    """Everything of a capture but its tensors."""

    format: Literal[1] = 1
    run_id: str = ""
    step: int
    source: str = ""
    rank: int = 0
    ranks: int = 1
    time: float = 0.0
    reason: str
    model: str
    loss: float | str | None = None
    scale: float | None = None  # what a loss scaler multiplied the loss by
    device: str = "cpu"
    evaluating: _Listed[str] = []  # modules that were in evaluation mode
    frozen: _Listed[str] = []
    parameters: _Listed[str]
    buffers: _Listed[str]
    batches: _Listed[Batch]
    optimizers: Any = None
    switches: dict[str, bool | int | str] = {}  # what decides with which kernels torch computes
    notes: _Listed[str] = []
    versions: dict[str, str] = {}
    report: dict[str, Any] = {}


class Encoder:
    """Turns nested values into JSON and named tensors; what neither can hold is replaced by the name of its type."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.lost: dict[str, None] = {}
        """The types of the values that are not kept."""
        self._known: dict[tuple[object, ...], str] = {}

    def add(self, name: str, tensor: Tensor) -> str:
        """Add a tensor under a name, unless one with the same elements in memory is there; return its name."""
        place = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype, tensor._is_view())
        if tensor.numel() and place in self._known:
            return self._known[place]
        self._known[place] = name
        self.tensors[name] = tensor.detach()
        return name

    def encode(self, value: Any, name: str, depth: int = 0) -> Any:
        """Return a value as JSON; its tensors get names that begin with this one."""
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, name) if is_plain(value) else self._lose(value)
        if isinstance(value, np.generic):
            return self.encode(value.item(), name, depth)
        if isinstance(value, np.ndarray):
            with contextlib.suppress(TypeError):
                return {"array": self.add(name, torch.from_numpy(np.ascontiguousarray(value)))}
            return self._lose(value)
        kind, entries = _parts(value)
        if kind is None or depth >= _DEEPEST or len(entries) > _MOST_ENTRIES:
            return self._lose(value)
        return {kind: [[key, self.encode(one, f"{name}.{key}", depth + 1)] for key, one in entries]}

    def _tensor(self, tensor: Tensor, name: str) -> Any:
        found: dict[str, Any] = {"tensor": self.add(name, tensor), "device": str(tensor.device)}
        if not tensor.is_contiguous():
            found["stride"] = list(tensor.stride())
        return found | ({"requires_grad": True} if tensor.requires_grad else {})

    def _lose(self, value: object) -> Any:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        self.lost[kind] = None
        return {"lost": kind}


def is_plain(tensor: Tensor) -> bool:
    """Say whether a tensor can be written: strided, on one rank, with elements of a type that the format has."""
    return (
        tensor.layout is torch.strided
        and tensor.dtype in _NAMES
        and not (tensor.is_nested or tensor.is_meta or is_distributed(tensor))
        and type(tensor).__name__ != "FakeTensor"
    )


def _parts(value: Any) -> tuple[str | None, list[tuple[Any, Any]]]:
    """Return the kind of a container, and its entries with their keys."""
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return "packed", list(value._asdict().items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "fields", list(zip(value._fields, value, strict=False))
    if isinstance(value, (list, tuple)):
        return "list" if isinstance(value, list) else "tuple", list(enumerate(value))
    if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        return "dict", list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "fields", [(one.name, getattr(value, one.name)) for one in dataclasses.fields(value)]
    return None, []


def write_capture(directory: Path, name: str, tensors: Mapping[str, Tensor], values: CaptureValues) -> Path:
    """Write a capture into a directory of its own, which gets its name once everything in it is on the disk."""
    text = values.model_dump_json().encode()
    if len(text) > _MOST_JSON:
        raise ValueError(f"its values have more than {_MOST_JSON} bytes as JSON")
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / name
    if target.exists():
        raise FileExistsError(f"{name} is there already")
    temporary = directory / f".{name}.{secrets.token_hex(4)}"
    temporary.mkdir()  # which others may read as far as the umask says
    try:
        with open(temporary / TENSORS, "wb") as stream:
            _write_tensors(stream, tensors)
            os.fsync(stream.fileno())
        with open(temporary / VALUES, "wb") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        _directory_to_disk(temporary)
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _directory_to_disk(directory)
    return target


def remove_remains(directory: Path, is_own: re.Pattern[str]) -> None:
    """Remove what a process that was killed has left of captures with such names."""
    for path in directory.glob(".capture-*"):
        if is_own.fullmatch(path.name[1:].rpartition(".")[0]):
            shutil.rmtree(path, ignore_errors=True)


def _directory_to_disk(directory: Path) -> None:
    with contextlib.suppress(OSError):  # Windows opens no directory
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_tensors(stream: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    header, end = dict[str, Any](), 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        here = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        content: Any = here.view(torch.uint8).numpy() if here.numel() else b""
        stream.write(content)
    stream.flush()


class SavedCapture:
    """A capture that is read: its values, and its tensors as they are asked for. Nothing in it is trusted."""

    def __init__(self, directory: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.directory, self._most_bytes = directory, most_bytes
        with self.checked():
            text = read_inside(directory, directory / VALUES, most_bytes=_MOST_JSON)
            self.values = CaptureValues.model_validate_json(check_json(text, most_memory=_MOST_MEMORY))
            self._stream = open_regular(directory / TENSORS, most_bytes=most_bytes)
        try:
            with self.checked():
                self._start, self._header = _read_header(self._stream)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file of the tensors."""
        self._stream.close()

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Say of anything that cannot be read what it is, and what to do."""
        try:
            yield
        except CaptureError:
            raise
        except FileNotFoundError:
            raise CaptureError(
                f"{str(self.directory)!r} is no capture: expected a directory with {VALUES} and {TENSORS}. "
                "Name one like RUN_DIR/capture-00120; a training writes it with capture='nonfinite'."
            ) from None
        except ValidationError as fault:
            raise self._damaged(f"{VALUES}: {fault.errors()[0]['msg']}") from None
        except (OSError, ValueError, TypeError, LookupError, RuntimeError, OverflowError) as fault:
            reason = fault.strerror if isinstance(fault, OSError) and fault.strerror else str(fault)
            raise self._damaged((reason.splitlines() or [type(fault).__name__])[0]) from None

    def _damaged(self, reason: str) -> CaptureError:
        return CaptureError(
            f"capture {str(self.directory)!r} cannot be read ({reason}): expected the files that a training wrote. "
            "Copy the whole directory again."
        )

    def form(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the type of the elements and the shape of a tensor, which need not be read for that."""
        return self._entry(name)[:2]

    def tensor(self, name: str) -> Tensor:
        """Read a tensor."""
        dtype, shape, start, end = self._entry(name)
        if start == end:
            return torch.empty(shape, dtype=dtype)
        with self.checked():
            content = bytearray(end - start)
            self._stream.seek(self._start + start)
            if self._stream.readinto(content) != len(content):  # type: ignore[attr-defined]
                raise ValueError(f"{TENSORS} ends too early")
            return torch.frombuffer(content, dtype=dtype).reshape(shape)

    def _entry(self, name: str) -> tuple[torch.dtype, tuple[int, ...], int, int]:
        with self.checked():
            return self._header[name]

    def decode(self, value: Any, device: torch.device | None = None) -> Any:
        """Return what `Encoder.encode` was given; tensors are put on the device that they were on, or on this one."""
        self._decoded, self._left = dict[str, Tensor](), self._most_bytes
        with self.checked():
            return self._decode(value, device, 0)

    def _once(self, name: str) -> Tensor:
        """Return a tensor that is read once however often values name it; all of them together are bounded."""
        found = self._decoded[name] if name in self._decoded else self.tensor(name)
        self._decoded[name], self._left = found, self._left - found.nbytes
        if self._left < 0:
            raise ValueError(f"one of its values has more than {self._most_bytes} bytes")
        return found.detach()

    def _decode(self, value: Any, device: torch.device | None, depth: int) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if depth > _DEEPEST or not isinstance(value, dict) or not value:
            raise ValueError(f"{VALUES} holds what no capture does")
        kind, content = next(iter(value.items()))
        if kind == "float":
            return float(str(content))
        if kind == "lost":
            raise CaptureError(
                f"the inputs of step {self.values.step} hold a value of the type {content}, which a capture does not "
                "keep: expected tensors, arrays, numbers and texts in lists, tuples, mappings and data classes. "
                "Pass such a batch=... to safe_backward."
            )
        if kind in ("array", "tensor"):
            return self._placed(value, device) if kind == "tensor" else self._once(content).numpy()
        entries = [(key, self._decode(one, device, depth + 1)) for key, one in content]
        if kind == "dict":
            return dict(entries)
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(one for _, one in entries)
        if kind == "packed":
            return nn.utils.rnn.PackedSequence(**dict(entries))
        if kind == "fields":
            names = [str(key) for key, _ in entries]
            return collections.namedtuple("Fields", names, rename=True)(*(one for _, one in entries))
        raise ValueError(f"{VALUES} holds a {kind!r}")

    def _placed(self, value: Mapping[str, Any], device: torch.device | None) -> Tensor:
        found, stride = self._once(value["tensor"]), value.get("stride")
        if stride and _is_dense(found.shape, stride):
            found = torch.empty_strided(found.shape, stride, dtype=found.dtype).copy_(found)
        found = found.to(device if device is not None else torch.device(str(value.get("device", "cpu"))))
        return found.requires_grad_() if value.get("requires_grad") is True else found

    def check_fits(self, kind: str, names: list[str], there: Mapping[str, Tensor]) -> None:
        """Refuse a model whose parameters or buffers are not those of the capture."""
        lacking, more = [name for name in names if name not in there], [name for name in there if name not in names]
        other = [
            f"{name} ({dtype} {list(shape)} in the capture, {there[name].dtype} {list(there[name].shape)} in the model)"
            for name in names
            if name in there
            for dtype, shape in [self.form(f"{kind}.{name}")]
            if (dtype, shape) != (there[name].dtype, tuple(there[name].shape))
        ]
        for what, found in (("lacks", lacking), ("has in addition", more), ("has in another form", other)):
            if found:
                raise CaptureError(
                    f"the model that make returned does not fit the capture: it {what} the {kind} {listed(found)}. "
                    f"Let make build the {self.values.model} of the training, with the same settings."
                )


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor with these strides only has its dimensions in another order, as channels_last has."""
    size = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length != 1 and step != size:
            return False
        size *= length
    return True


def _read_header(stream: BinaryIO) -> tuple[int, dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]]:
    """Return where the tensors begin, and each with its type, shape and place; refuse a file with any other byte."""
    size = os.fstat(stream.fileno()).st_size
    (length,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\xff"))
    if length > min(_MOST_JSON, size - 8):
        raise ValueError(f"the header of {TENSORS} is cut off")
    header = json.loads(check_json(stream.read(length)))
    if not isinstance(header, dict):
        raise ValueError(f"the header of {TENSORS} is no mapping")
    header.pop("__metadata__", None)
    found, last = dict[str, tuple[torch.dtype, tuple[int, ...], int, int]](), 0
    for name, entry in header.items():
        dtype, shape, (start, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, start, end)
        if len(shape) > _MOST_DIMENSIONS or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"the place of {name} is wrong")
        if start != last or end - start != math.prod(shape) * dtype.itemsize or max(shape, default=0) >= 2**62:
            raise ValueError(f"the size of {name} is wrong")
        found[name], last = (dtype, shape, start, end), end
    if 8 + length + last != size:
        raise ValueError(f"{TENSORS} is cut off, or longer than its header says")
    return 8 + length, found
