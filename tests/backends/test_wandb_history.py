"""The reader of W&B's own files against files that no W&B has written."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("wandb")

from gradtrack.backends.wandb.history import Index, count_rows, read_keys
from gradtrack.support.regular_files import LONGEST_MESSAGE

BLOCK, HEADER = 32768, 7


def history_of(values: Mapping[str, Any]) -> bytes:
    """Return a row as W&B writes it."""
    from wandb.proto.wandb_internal_pb2 import HistoryItem, HistoryRecord, Record

    items = [HistoryItem(nested_key=[name], value_json=json.dumps(value)) for name, value in values.items()]
    return bytes(Record(history=HistoryRecord(item=items)).SerializeToString())


def framed(records: list[bytes], most: int = BLOCK) -> bytes:
    """Return records in the framing of the file: blocks, each record in as many parts as it needs."""
    content = bytearray(HEADER)
    for record in records:
        for kind, data in parts_of(record, content, most):
            content += struct.pack("<IHB", 0, len(data), kind) + data
    return bytes(content)


def parts_of(record: bytes, content: bytearray, most: int) -> Iterator[tuple[int, bytes]]:
    """Cut a record where a block ends."""
    start, first = 0, True
    while first or start < len(record):
        if (left := BLOCK - len(content) % BLOCK) < HEADER:
            content += bytes(left)
            left = BLOCK
        data = record[start : start + min(left - HEADER, most)]
        start += len(data)
        last = start == len(record)
        yield (1 if last else 2) if first else (4 if last else 3), data
        first = False


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 70_000), max_size=8), st.integers(1000, BLOCK))
def test_records_of_any_size_are_read(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], most: int) -> None:
    """In however many parts they come."""
    path = tmp_path_factory.mktemp("wandb") / "run.wandb"
    rows = [history_of({"gradtrack/step": at, "text": "x" * size}) for at, size in enumerate(sizes)]
    path.write_bytes(framed(rows, most))
    wanted = {("", at): {"gradtrack/step": float(at)} for at in range(len(sizes) + 1)}
    assert Index().find([path], wanted) == {("", at) for at in range(len(sizes))}
    assert (count_rows(path), read_keys([path])) == (len(sizes), {"gradtrack/step", "text"} if sizes else set())


def test_a_record_of_many_parts_is_read_once_or_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Joined one by one, the parts of 32 MB took half a minute; beyond a bound none of them is kept."""
    large = b"\x01" * (LONGEST_MESSAGE + 1)
    (tmp_path / "run.wandb").write_bytes(
        framed([history_of({"gradtrack/step": 1}), large, history_of({"gradtrack/step": 2})], 1000)
    )
    assert count_rows(tmp_path / "run.wandb") == 2
    assert f"a record of {len(large)} bytes in 'run.wandb' is passed over" in caplog.text


def test_what_is_no_number_is_not_parsed(tmp_path: Path) -> None:
    """A history may hold anything; garbage costs its own record only."""
    odd = {"list": [[]] * 1000, "text": "5", "large": 10**400, "nan": float("nan"), "true": True}
    (tmp_path / "run.wandb").write_bytes(
        framed([history_of({"gradtrack/step": 1, **odd}), b"\xff garbage", history_of({"gradtrack/step": 2})])
    )
    wanted = {("", 1): {"nan": float("nan")}, ("", 2): {"gradtrack/step": 2.0}}
    assert Index().find([tmp_path / "run.wandb"], wanted) == set(wanted)
    assert Index().find([tmp_path / "run.wandb"], {("", 1): {"text": 5.0}}) == set()


def test_an_item_without_a_name_is_no_error(tmp_path: Path) -> None:
    """W&B writes none."""
    (tmp_path / "run.wandb").write_bytes(framed([b"\x12\x02\x0a\x00"]))
    assert read_keys([tmp_path / "run.wandb"]) == {""}
