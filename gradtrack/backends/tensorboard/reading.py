"""What event files hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradtrack.backends.tensorboard.events import STEP, description_of

_Key = tuple[str, int, float]


class Index:
    """The records of a run in event files, which are read on as they grow: asking again costs only what is new.

    `reached` is the last step of each pair.
    """

    def __init__(self) -> None:
        self.reached: dict[str, int] = {}
        self._run_id = ""
        self._files: dict[Path, os.stat_result] = {}
        self._loaders: dict[Path, Any] = {}
        self._tags: dict[_Key, frozenset[str]] = {}
        self._known: dict[frozenset[str], frozenset[str]] = {}

    def read(self, directories: list[Path], run_id: str) -> dict[_Key, frozenset[str]]:
        """Return the tags of every record by its source, step and time."""
        files = {path: path.stat() for directory in directories for path in _files_in(directory)}
        if run_id != self._run_id or not all(_goes_on(known, files.get(path)) for path, known in self._files.items()):
            self._run_id, self._files, self._loaders, self._tags, self.reached = run_id, {}, {}, {}, {}
        for path in files:
            for event in self._loaders.setdefault(path, _loader(path)).Load():
                self._take(event)
        self._files = files
        return self._tags

    def _take(self, event: Any) -> None:
        for value in event.summary.value:
            if value.tag.startswith(STEP) and value.metadata.summary_description == description_of(self._run_id):
                key = value.tag.removeprefix(STEP).removeprefix("/"), event.step, event.wall_time
                tags = frozenset(value.tag for value in event.summary.value) | self._tags.get(key, frozenset())
                self._tags[key] = self._known.setdefault(tags, tags)
                self.reached[key[0]] = max(event.step, self.reached.get(key[0], event.step))


def read_tags(directory: Path, run_id: str) -> set[str]:
    """Find the tags that carry the identity of a run in the event files of a directory."""
    values = (value for event in _read(directory) for value in event.summary.value)
    return {value.tag for value in values if value.metadata.summary_description == description_of(run_id)}


def _read(directory: Path) -> Iterator[Any]:
    for path in _files_in(directory):
        yield from _loader(path).Load()


def _files_in(directory: Path) -> list[Path]:
    return sorted(directory.glob("*tfevents*"))


def _goes_on(known: os.stat_result, now: os.stat_result | None) -> bool:
    """Say whether a file is the one that was read, and not a new one in its place."""
    return now is not None and known.st_ino == now.st_ino and known.st_size <= now.st_size


def _loader(path: Path) -> Any:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return LegacyEventFileLoader(str(path))
