"""What event files hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradtrack.backends.tensorboard.events import STEP, description_of


def read_rows(directory: Path, run_id: str) -> Iterator[tuple[str, int, float, set[str]]]:
    """Find source, step, time and tags of every record of a run in the event files of a directory."""
    for event in _read(directory):
        for value in event.summary.value:
            if value.tag.startswith(STEP) and value.metadata.summary_description == description_of(run_id):
                tags = {value.tag for value in event.summary.value}
                yield value.tag.removeprefix(STEP).removeprefix("/"), event.step, event.wall_time, tags


def read_tags(directory: Path, run_id: str) -> set[str]:
    """Find the tags that carry the identity of a run in the event files of a directory."""
    values = (value for event in _read(directory) for value in event.summary.value)
    return {value.tag for value in values if value.metadata.summary_description == description_of(run_id)}


def _read(directory: Path) -> Iterator[Any]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for path in sorted(directory.glob("*tfevents*")):
        yield from LegacyEventFileLoader(str(path)).Load()
