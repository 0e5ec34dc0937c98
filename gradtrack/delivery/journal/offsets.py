"""How far each backend has taken a journal, on disk next to it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gradtrack.delivery.run_files import write_atomically

_FORMAT: Final = 1
_MOST_REFUSED: Final = 10_000


class Offsets:
    """The acknowledged rows of one journal: for each backend the next row, those it refused, and where it writes to.

    Several workers set their own entry; a file that cannot be written is left as it was, since a replay asks the
    destination and takes the offsets only as a hint.
    """

    def __init__(self, path: Path | None, *, interval_seconds: float = 0.5) -> None:
        self.path = path
        self._interval = interval_seconds
        self._entries: dict[str, dict[str, Any]] = {}
        self._written = 0.0

    def set(self, name: str, following: int, refused: list[int], address: Mapping[str, Any]) -> None:
        """Note that a backend has taken, or refused, every row before this one."""
        self._entries[name] = {
            "next": following,
            "refused": refused[:_MOST_REFUSED],
            "address": dict(address),
        }
        if time.monotonic() - self._written >= self._interval:
            self.save()

    def keep(self, name: str, entry: Mapping[str, Any]) -> None:
        """Take over an entry that was read from the file."""
        self._entries[name] = dict(entry)

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self.path is None or not self._entries:
            return
        self._written = time.monotonic()
        try:
            text = json.dumps({"gradtrack_offsets": _FORMAT, "backends": dict(self._entries)}, default=str)
            write_atomically(self.path, text, mode=0o600, durable=False)
        except OSError:
            return


def offsets_path(first_part: Path) -> Path:
    """Name the offsets file of the journal that begins with this part."""
    return first_part.with_suffix(".acknowledged.json")


def read_offsets(path: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of the backends; nothing where the file is missing, foreign or damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["gradtrack_offsets"] != _FORMAT:
            return {}
        return {
            str(name): {
                "next": int(entry["next"]),
                "refused": [int(number) for number in entry["refused"]],
                "address": dict(entry["address"]),
            }
            for name, entry in values["backends"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}
