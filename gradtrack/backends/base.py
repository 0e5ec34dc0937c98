"""The interface of a backend."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from gradtrack.errors import MissingExtraError
from gradtrack.records import Panel, Record, RunInfo

Outcome = Literal["finished", "failed", "killed"]
"""How a training ended: `killed` is one whose process is gone without a word."""


class Backend(ABC):
    """A place where records go.

    A backend is one file with one class, and `write` is all that it must have. A tracker's package is imported in the
    constructor, never at the top of the file; the constructor runs on the training thread, everything else on a worker
    of the backend's own, so `write` may block or raise without slowing or stopping the training. Raise
    `PermanentBackendError` for a record that can never be taken; after any other exception the same records come again.
    """

    inline: ClassVar[bool] = False
    """Whether `write` is so quick that it runs on the training thread, within the step that made the record."""

    code_options: ClassVar[frozenset[str]] = frozenset()
    """The options that name code to import, which a replay takes from the user and never from a journal alone."""

    own_links: ClassVar[frozenset[str]] = frozenset()
    """The names of links to elsewhere that the tracker's package leaves among its files, and never writes through."""

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Deliver records in the order in which they were made; the first of a run carries its `RunInfo`."""

    def flush(self) -> None:
        """Make everything that was written durable."""

    def close(self, *, failed: bool = False) -> None:
        """Let go of the tracker; `failed` says that the training raised. A second call does nothing."""

    def present(self, records: Sequence[Record]) -> set[tuple[str, int]] | None:
        """Return which of these records the destination already has, as (source, step); None where it cannot tell.

        No two of the records share source and step, so a destination that keeps times may compare them as well.
        It is asked before records come again: by a replay, and after a `write` that raised half way.
        """
        return None

    def address(self) -> Mapping[str, Any]:
        """Return the options, as plain data, with which the constructor reaches the same place again for a replay."""
        return {}

    def prepare(self) -> None:
        """Get ready for the first records, where that takes long; called in a process of the backend's own only."""

    def portable(self) -> Mapping[str, Any] | None:
        """Return the options with which a process of its own does this backend's work; None keeps the work here.

        A tracker whose package takes the interpreter for long is best kept out of the training's process. The options
        are plain data; they may hold secrets, since only that process sees them.
        """
        return None

    def moved(self, address: Mapping[str, Any]) -> None:
        """Take note of the address that the process which does this backend's work has told."""

    def before_end(self, deliver: Callable[[], object]) -> None:
        """Take what brings the rows that still wait, to call it just before the tracker's run is ended elsewhere."""
        return

    def confine(self, directory: Path) -> None:
        """Expect files of another person in this run directory; called by a replay before the first record.

        Raise where one of them would choose the server, and write no file outside that one of them names.
        """

    def end_run(self, outcome: Outcome, *, time: float) -> str:
        """End the tracker's run of a training that is over, where a backend of this kind has begun it and it is open.

        Called by a replay that has delivered everything, with the `time` of the last row. A run of the user is left as
        it is. Return the status that the run has got, or nothing.
        """
        return ""

    @classmethod
    def configured(cls) -> Mapping[str, Any]:
        """Return the options that name the place which the environment of this process has chosen for the tracker.

        A replay sends to a server that a journal names only where that is the same, on this machine or given by the
        user.
        """
        return {}

    @classmethod
    def probe(cls, **options: Any) -> str:
        """Say where records would go with these options, and create nothing; raise what would stop them."""
        return ""


def package_of(name: str, *, package: str = "", extra: str = "") -> Any:
    """Return the package of the backend that has its name, or a module of what `extra` installs."""
    try:
        return importlib.import_module(name)
    except ImportError as fault:
        raise MissingExtraError(f"{extra or name} backend", package or name, extra or name) from fault


def address_of(backend: Backend) -> dict[str, Any]:
    """Return the address of a backend; nothing while it cannot tell it."""
    with contextlib.suppress(Exception):
        return dict(backend.address())
    return {}


class RunParts:
    """What the records so far have told of their run: its identity, its panels and its files, each once."""

    def __init__(self, run: RunInfo | None = None) -> None:
        self.run = run
        self.panels: dict[Panel, None] = {}
        self.files: dict[str, None] = {}

    def take(self, records: Iterable[Record]) -> None:
        """Learn from records."""
        for record in records:
            self.run = record.run or self.run
            self.panels.update(dict.fromkeys(record.panels))
            self.files.update(dict.fromkeys(record.files))

    def added_to(self, record: Record) -> Record:
        """Return a record that tells all of it."""
        panels = tuple(dict.fromkeys((*self.panels, *record.panels)))
        files = tuple(dict.fromkeys((*self.files, *record.files)))
        return dataclasses.replace(record, run=record.run or self.run, panels=panels, files=files)
