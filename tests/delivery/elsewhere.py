"""A destination for backends that work in a process of their own: a directory that the tests read."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradtrack.backends.base import Backend
from gradtrack.delivery.journal.codec import decode_row, encode_row
from gradtrack.delivery.subprocess import ROOT
from gradtrack.errors import PermanentBackendError
from gradtrack.records import Record


class FolderBackend(Backend):
    """Keeps rows in a file; the source of a record says what goes wrong with it, where something does."""

    name = "folder"

    def __init__(self, folder: str, *, token: str = "", portable: bool = True) -> None:
        self.folder, self.token, self._portable = Path(folder), token, portable
        self.told: dict[str, Any] = {}

    def prepare(self) -> None:
        """Tell of it."""
        self._tell("prepare")

    def write(self, records: Sequence[Record]) -> None:
        """Keep the records, and the runs that they carry."""
        for record in records:
            self._fail(record.source)
            with (self.folder / "rows").open("ab") as rows:
                rows.write(encode_row(os.getpid(), record, ROOT))
            if record.run is not None:
                self._tell(f"run {record.run.run_id} {record.run.run_dir}")

    def flush(self) -> None:
        """Tell of it."""
        self._tell("flush")

    def close(self, *, failed: bool = False) -> None:
        """Tell of it, where the work is done here."""
        if not self._portable:
            self._tell(f"close {failed}")

    def present(self, records: Sequence[Record]) -> set[tuple[str, int]]:
        """Name the records that the file has."""
        self._tell(f"present {len(records)}")
        kept = {(record.source, record.step) for record in rows_in(self.folder)}
        return {key for record in records if (key := (record.source, record.step)) in kept}

    def address(self) -> Mapping[str, Any]:
        """Return the folder, and who writes there."""
        return {"folder": str(self.folder), "writer": os.getpid()}

    def portable(self) -> Mapping[str, Any] | None:
        """Return the constructor's options."""
        return {"folder": str(self.folder), "token": self.token, "portable": False} if self._portable else None

    def moved(self, address: Mapping[str, Any]) -> None:
        """Keep what was told."""
        self.told = dict(address)

    def _fail(self, source: str) -> None:
        if source == "permanent":
            raise PermanentBackendError("folder: it never takes this")
        if source == "broken":
            raise ZeroDivisionError("seven")
        if source == "once" and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.write(2, f"last words with {self.token}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        if source == "log":
            logging.getLogger("gradtrack").warning("folder: %s", "something to know")
        if source == "print":
            print("noise")

    def _tell(self, line: str) -> None:
        with (self.folder / "told").open("a", encoding="utf-8") as told:
            told.write(f"{line}\n")


def rows_in(folder: Path) -> list[Record]:
    """Return the records that a folder has."""
    if not (folder / "rows").exists():
        return []
    lines = (folder / "rows").read_bytes().splitlines(keepends=True)
    return [decode_row(line, ROOT, trusted=True)[1] for line in lines]


def told_in(folder: Path) -> list[str]:
    """Return what a backend told, a line each."""
    path = folder / "told"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def writers_in(folder: Path) -> list[int]:
    """Number the processes that wrote the rows, in the order of the rows."""
    return [json.loads(line)["n"] for line in (folder / "rows").read_bytes().splitlines()]
