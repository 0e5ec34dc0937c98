"""Two readers of a W&B run's own file, neither of them the backend's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def rows_of(run_directory: Path, *, ended: bool = True) -> list[dict[str, Any]]:
    """Read the history rows of a run with W&B's own tool and with a reader of ours, and hold them to each other."""
    messages = messages_of(run_directory, ended=ended)
    by_hand = [_row(message) for message in messages if message.HasField("history")]
    assert _normal(_inspect(run_directory)) == _normal(by_hand)
    return by_hand


def messages_of(run_directory: Path, *, ended: bool = True) -> list[Any]:
    """Read everything in a run's file, which W&B's own process writes to a moment longer than the training lasts.

    One that does not end is read when nothing has come for a while.
    """
    end, quiet, last = time.monotonic() + 120, 0.0, -1
    while True:
        files = list(run_directory.glob("*.wandb"))
        messages = list(_parse(files[0].read_bytes())) if files else []
        quiet, last = (quiet + 0.05 if files and len(messages) == last else 0.0), len(messages)
        if any(message.HasField("exit") for message in messages) or (not ended and quiet > 1.0):
            return messages
        assert time.monotonic() < end, f"the file in {run_directory} never ends"
        time.sleep(0.05)


def _normal(rows: list[dict[str, Any]]) -> str:
    """Return rows as text; the tool reads every number as a double."""
    as_doubles = json.loads(json.dumps(rows, sort_keys=True), parse_int=float)
    return json.dumps(as_doubles)


def _inspect(run_directory: Path) -> list[dict[str, Any]]:
    tool = Path(sys.executable).parent / "wandb"
    environment = {**os.environ, "WANDB_MODE": "offline"}
    command = [str(tool), "leet", "inspect", "--json", str(run_directory)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    found = (json.loads(line) for line in output.splitlines())
    return [_plain(record["history"]) for record in found if record["type"] == "history"]


def _plain(history: dict[str, Any]) -> dict[str, Any]:
    """Give back the words that the tool puts in place of NaN and the infinities."""
    words = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
    row = history["item"]
    return dict(
        sorted((key, words.get(value, value) if isinstance(value, str) else value) for key, value in row.items())
    )


def _row(message: Any) -> dict[str, Any]:
    items = message.history.item
    return dict(sorted((".".join(item.nested_key) or item.key, json.loads(item.value_json)) for item in items))


def _parse(content: bytes) -> Iterator[Any]:
    """Join the fragments of each record: a checksum, a length and a kind stand before each of them."""
    from wandb.proto.wandb_internal_pb2 import Record

    assert content[:4] == b":W&B"
    record, at = bytearray(), 7
    while at + 7 <= len(content):
        in_block = at & 0x7FFF
        if in_block > 0x8000 - 7:
            at += 0x8000 - in_block
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        if not kind or at + 7 + size > len(content):
            return
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole of a record, or the last part of one
            yield Record.FromString(bytes(record))
            record.clear()
