"""What a W&B run's own file holds."""

from __future__ import annotations

import importlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gradtrack.backends.wandb.names import STEP, axis_of

Wanted = Mapping[tuple[str, int], Mapping[str, float]]


def files_of(run_id: str, directory: str) -> list[Path]:
    """Return the files of a run; each process that went on with it has left one."""
    return sorted(Path(directory, "wandb").glob(f"*run-*-{run_id}*/run-{run_id}.wandb"))


def find_rows(files: Iterable[Path], wanted: Wanted) -> set[tuple[str, int]]:
    """Return which of these rows, by source and step, the files hold with the same values."""
    sources = {source for source, _ in wanted}
    found = set()
    for row in (row for path in files for row in read_history(path)):
        for source in sources:
            step = row.get(axis_of(source))
            metrics = wanted.get((source, step)) if isinstance(step, int) else None
            if metrics is not None and all(_same(row.get(name), value) for name, value in metrics.items()):
                found.add((source, int(step or 0)))
    return found


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a run's own file: blocks of records, each whole or in parts, as far as they are intact."""
    for items in _read_items(path):
        yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def count_rows(path: Path) -> int:
    """Count the rows of ours."""
    return sum(any(_is_axis(item) for item in items) for items in _read_items(path))


def _is_axis(item: Any) -> bool:
    name: str = item.key or ".".join(item.nested_key)
    return name == STEP or name.startswith(f"{STEP}/")


def read_keys(files: Iterable[Path]) -> set[str]:
    """Return the names under which anything was logged."""
    rows = (items for path in files for items in _read_items(path))
    return {item.key or item.nested_key[0] for items in rows for item in items}


def _read_items(path: Path) -> Iterator[Any]:
    message = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    for content in _read_records(path.read_bytes()):
        record = message()
        try:
            record.ParseFromString(content)
        except Exception:
            return
        if record.HasField("history"):
            yield record.history.item


def _read_records(content: bytes, block: int = 32768, header: int = 7) -> Iterator[bytes]:
    position, parts = header, b""
    while position + header <= len(content):
        left = block - position % block
        if left < header:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        data = content[position + header : position + header + length]
        if kind == 0 or len(data) < length:
            return
        position += header + length
        parts = data if kind in (1, 2) else parts + data
        if kind in (1, 4):
            yield parts


def _same(left: object, right: float) -> bool:
    if not isinstance(left, (int, float)):
        return False
    return left == right or (math.isnan(left) and math.isnan(right))
