"""Files that are whole or not there, and directories that are made when they are needed."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

from gradtrack.errors import RunDirectoryError


def write_atomically(path: Path, text: str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace a file by a new one in one move, so that no reader and no crash ever meets half of it.

    Unless `durable`, the new content may not be there yet after a loss of power.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, values: Any) -> None:
    """Write JSON as Python's own `json` reads it: NaN and Infinity as these words."""
    write_atomically(path, json.dumps(values, indent=1))


def new_run_id() -> str:
    """Name a run by the time in UTC, the process and four random bytes."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}-{secrets.token_hex(4)}"


def ensure_writable(directory: Path) -> None:
    """Make a directory that the user named, or say why its files could not be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as fault:
        raise RunDirectoryError(
            f"run_dir {str(directory)!r}: expected a directory that can be written ({fault.strerror or fault}). "
            "Choose another run_dir."
        ) from fault
