"""A W&B run's own file: what it holds, and whether it has kept what the run took."""

from __future__ import annotations

import contextlib
import glob
import importlib
import json
import logging
import math
import os
import shutil
import struct
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gradtrack.backends.wandb.columns import STEP, axis_of
from gradtrack.errors import BackendError
from gradtrack.support.regular_files import LONGEST_MESSAGE, check_message, is_regular, open_regular

_Row = tuple[tuple[str, ...], "array[float]"]
_BLOCK: Final = 32768
_HEADER: Final = 7
_LONGEST_NUMBER: Final = 64
_logger = logging.getLogger("gradtrack")


def files_of(run_id: str, directory: str) -> list[Path]:
    """Return the files of a run; each process that went on with it has left one."""
    files = Path(directory, "wandb").glob(f"*run-*-{glob.escape(run_id)}*/run-{glob.escape(run_id)}.wandb")
    return sorted(path for path in files if is_regular(path))


class Index:
    """The rows of ours in a run's files, which are read on as they grow: asking again costs only what is new."""

    def __init__(self) -> None:
        self._files: dict[Path, _File] = {}
        self._rows: dict[tuple[str, int], list[_Row]] = {}
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}

    def find(
        self, files: Sequence[Path], wanted: Mapping[tuple[str, int], Mapping[str, float]]
    ) -> set[tuple[str, int]]:
        """Return which of these rows, by source and step, the files hold with the same values."""
        if any(path not in files or known.shrunk() for path, known in self._files.items()):
            self._files, self._rows = {}, {}  # one was removed or replaced
        for path in files:
            for items in self._files.setdefault(path, _File(path)).read_items():
                self._take(items)
        return {key for key, metrics in wanted.items() if self._has(axis_of(key[0]), key[1], metrics)}

    def _take(self, items: Any) -> None:
        found = {_name_of(item): _number(item.value_json) for item in items}
        row = {name: value for name, value in found.items() if value is not None}
        for name, value in row.items():
            if _is_axis(name) and isinstance(value, int):
                names = self._names.setdefault(tuple(row), tuple(row))
                self._rows.setdefault((name, value), []).append((names, array("d", row.values())))

    def _has(self, axis: str, step: int, metrics: Mapping[str, float]) -> bool:
        rows = (dict(zip(names, values, strict=True)) for names, values in self._rows.get((axis, step), ()))
        return any(all(_same(row.get(name), value) for name, value in metrics.items()) for row in rows)


class _File:
    """A run's own file: blocks of records, each whole or in parts, read from where the last reading ended."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, _HEADER

    def shrunk(self) -> bool:
        """Say whether the file is shorter than what was read of it."""
        try:
            return self._path.stat().st_size < self._position
        except OSError:
            return self._position > _HEADER

    def read_items(self) -> Iterator[Any]:
        """Yield the items of each row that is new, as far as the file is intact."""
        message = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
        for content in self._read_records():
            record = message()
            try:
                record.ParseFromString(check_message(content))
            except Exception:  # it is no message of W&B's, or one that takes too much memory
                continue
            if record.HasField("history"):
                yield record.history.item

    def _read_records(self) -> Iterator[bytes]:
        """Yield the content of each record that is whole; one of more bytes than a row ever has is passed over."""
        with open_regular(self._path) as stream:
            position, size, parts = stream.seek(self._position), 0, list[bytes]()
            while True:
                left = _BLOCK - position % _BLOCK
                if left < _HEADER:
                    position = stream.seek(left, os.SEEK_CUR)
                    continue
                header = stream.read(_HEADER)
                if len(header) < _HEADER:
                    return
                _, length, kind = struct.unpack("<IHB", header)
                data = stream.read(length)
                if kind == 0 or len(data) < length:
                    return
                position += _HEADER + length
                if kind in (1, 2):
                    size, parts = 0, []
                size += length
                if data and size <= LONGEST_MESSAGE:
                    parts.append(data)
                if kind in (1, 4):
                    self._position = position
                    if size <= LONGEST_MESSAGE:
                        yield b"".join(parts)
                    else:
                        _logger.warning("wandb: a record of %d bytes in %a is passed over", size, self._path.name)
                    size, parts = 0, []


def count_rows(path: Path) -> int:
    """Count the rows of ours."""
    return sum(any(_is_axis(_name_of(item)) for item in items) for items in _File(path).read_items())


def _name_of(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _number(text: str) -> int | float | None:
    """Return a value that is a number; any other may be long, and is not parsed."""
    if len(text) <= _LONGEST_NUMBER:
        with contextlib.suppress(ValueError):
            value = json.loads(text)
            return value if isinstance(value, (int, float)) else None
    return None


def _is_axis(name: str) -> bool:
    return name == STEP or name.startswith(f"{STEP}/")


def read_keys(files: Iterable[Path]) -> set[str]:
    """Return the names under which anything was logged."""
    rows = (items for path in files for items in _File(path).read_items())
    return {item.key or next(iter(item.nested_key), "") for items in rows for item in items}


def _same(left: object, right: float) -> bool:
    if not isinstance(left, (int, float)):
        return False
    return left == right or (math.isnan(left) and math.isnan(right))


_PATIENCE_SECONDS: Final = 3.0
_LARGEST_FILE: Final = 128 * 2**20
_LAST_WORDS: Final = 64 * 2**10
_LITTLE_SPACE: Final = 2**17


def check_own(run: Any, written: int) -> None:
    """Raise where the file of a finished run of ours lacks rows; it is complete a moment after the finish."""
    file = _file(run)
    if file is None or file.stat().st_size > _LARGEST_FILE:
        return
    end = time.monotonic() + _PATIENCE_SECONDS
    while (there := count_rows(file)) < written:
        if time.monotonic() >= end:
            raise BackendError(
                f"wandb: {there} of {written} rows are in its file {file}. Make room on the disk; "
                "`gradtrack replay` delivers the others."
            )
        time.sleep(0.05)


def check_attached(run: Any) -> None:
    """Raise where a run that goes on has lost records, or is about to."""
    file = _file(run)
    if file is None:
        return
    words, free = _last_words(file.parent / "logs" / "debug-internal.log"), shutil.disk_usage(file.parent).free
    if b"failed to save record" in words or free < _LITTLE_SPACE:
        raise BackendError(
            f"wandb: the disk of {file.parent} is full, and W&B drops what it cannot write. Make room; "
            "`gradtrack replay` delivers what is missing after the run."
        )


def _last_words(path: Path) -> bytes:
    try:
        with path.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - _LAST_WORDS, 0))
            return log.read()
    except OSError:
        return b""


def _file(run: Any) -> Path | None:
    found = sorted(Path(run.dir).parent.glob("run-*.wandb"))
    return found[0] if found else None
