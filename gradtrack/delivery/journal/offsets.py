"""How far each backend has taken a journal, on disk next to it."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gradtrack.delivery.run_files import write_atomically
from gradtrack.support.regular_files import MEBIBYTE, check_json, read_regular

_MOST_REFUSED: Final = 10_000
_MOST_BYTES: Final = 16 * MEBIBYTE
_RUN_ID: Final = re.compile(r"[\w\-][\w.\-]{0,199}")


def identity_of(address: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells a run apart at its place: its identity there, and the metrics that it is not given.

    Where that place is, only the header of the journal says, or the user: an entry here that named a server would get
    the user's credentials, unseen by those who have looked at the header.
    """
    run_id, withheld = address.get("run_id"), address.get("withhold")
    found: dict[str, Any] = {}
    if isinstance(run_id, str) and _RUN_ID.fullmatch(run_id):
        found["run_id"] = run_id
    if isinstance(withheld, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in withheld):
        found["withhold"] = list(withheld)
    return found


class Offsets:
    """The acknowledged rows of one journal: for each backend the next row, those it refused, and the run's identity.

    Several workers set their own entry; `entries` are those that the file has. A file that cannot be written is left as
    it was, since a replay asks the destination and takes the offsets only as a hint.
    """

    def __init__(
        self, path: Path | None, *, entries: Mapping[str, dict[str, Any]] | None = None, interval_seconds: float = 0.5
    ) -> None:
        self.path = path
        self._interval, self._written = interval_seconds, 0.0
        self._entries = dict(entries or {})

    def set(self, name: str, following: int, refused: list[int], address: Mapping[str, Any]) -> None:
        """Note that a backend has taken, or refused, every row before this one."""
        self._entries[name] = {
            "next": following,
            "refused": refused[:_MOST_REFUSED],
            "address": identity_of(address),
        }
        if time.monotonic() - self._written >= self._interval:
            self.save()

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self.path is None or not self._entries:
            return
        self._written = time.monotonic()
        text = json.dumps({"gradtrack_offsets": 1, "backends": dict(self._entries)}, default=str)
        with contextlib.suppress(OSError):
            write_atomically(self.path, text, mode=0o600, durable=False)


def offsets_path(first_part: Path) -> Path:
    """Name the offsets file of the journal that begins with this part."""
    return first_part.with_suffix(".acknowledged.json")


def read_offsets(path: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of the backends; nothing where the file is missing, foreign or damaged."""
    try:
        values = json.loads(check_json(read_regular(path, most_bytes=_MOST_BYTES)))
        if values["gradtrack_offsets"] != 1:
            return {}
        return {
            str(name): {
                "next": int(entry["next"]),
                "refused": [int(number) for number in entry["refused"]],
                "address": identity_of(dict(entry["address"])),
            }
            for name, entry in values["backends"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}
