"""The files that gradtrack leaves of a run to be looked at: pictures and its report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gradtrack.record.files import write_json
from gradtrack.records import RunInfo

LEAVINGS: Final = "leavings.json"


def note_files(directory: Path, run_id: str, paths: Iterable[Path]) -> Path:
    """Write down which files of a run's directory are its own: other people's files may lie beside them."""
    path = directory / LEAVINGS
    write_json(path, {"run_id": run_id, "files": [found.name for found in paths if found.parent == directory]})
    return path


def files_to_show(run: RunInfo | None, named: Iterable[str] = ()) -> list[Path]:
    """Return the files that records have named, then those that the run has left in its directory, each once."""
    found = {Path(path): None for path in named}
    if run is not None and run.run_dir is not None:
        found.update((path, None) for path in noted_files(Path(run.run_dir), run.run_id))
    return [path for path in found if path.is_file()]


def noted_files(directory: Path, run_id: str) -> list[Path]:
    """Return the files of a directory that a run has written down as its own."""
    try:
        values = json.loads((directory / LEAVINGS).read_text(encoding="utf-8"))
        return [directory / Path(str(name)).name for name in values["files"]] if values["run_id"] == run_id else []
    except (OSError, ValueError, KeyError, TypeError):
        return []
