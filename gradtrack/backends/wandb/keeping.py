"""Whether a W&B run has kept what it took: on a full disk it takes rows, drops them and says nothing."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any, Final

from gradtrack.backends.wandb.history import count_rows
from gradtrack.errors import BackendError

_PATIENCE_SECONDS: Final = 3.0
_LARGEST_FILE: Final = 128 * 2**20
_LAST_WORDS: Final = 64 * 2**10
_LITTLE_SPACE: Final = 2**17
_TRACE: Final = b"failed to save record"


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
    if (
        _TRACE in _last_words(file.parent / "logs" / "debug-internal.log")
        or shutil.disk_usage(file.parent).free < _LITTLE_SPACE
    ):
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
