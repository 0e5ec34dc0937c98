"""The files that a run leaves to be looked at: pictures and its report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gradtrack.records import RunInfo

_KINDS: Final = (".html", ".png")


def files_to_show(run: RunInfo | None, named: Iterable[str] = ()) -> list[Path]:
    """Return the files that records have named, then the pictures and reports in the run's directory, each once."""
    found = {Path(path): None for path in named}
    directory = None if run is None or run.run_dir is None else Path(run.run_dir)
    if directory is not None and directory.is_dir():
        found.update((path, None) for path in sorted(directory.iterdir()) if path.suffix in _KINDS)
    return [path for path in found if path.is_file()]
