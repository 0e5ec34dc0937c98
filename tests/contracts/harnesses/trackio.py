"""The Trackio backend under test, in a store of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradtrack.backends.trackio import TrackioBackend, metric_name
from tests.backends.stores import moved_trackio
from tests.contracts.harness import Harness


class TrackioHarness(Harness):
    """A run of a project in the store of Trackio, which lies in the directory of the test meanwhile."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        pytest.importorskip("trackio", reason='it is not installed: pip install "gradtrack[trackio]"')
        self._moved = moved_trackio(directory / "trackio")
        self._moved.__enter__()

    def open(self) -> TrackioBackend:
        return TrackioBackend(project="contract")

    def read(self) -> dict[str, list[tuple[int, float]]]:
        from trackio.sqlite_storage import SQLiteStorage

        originals = _Originals()
        rows: dict[str, list[tuple[int, float]]] = {}
        for record in SQLiteStorage.get_run_records("contract"):
            for row in SQLiteStorage.get_logs("contract", run_id=record["id"]):
                for name, value in row.items():
                    if name not in ("step", "timestamp"):
                        rows.setdefault(originals[name], []).append((row["step"], value))
        return rows

    def release(self) -> None:
        self._moved.__exit__(None, None, None)


class _Originals:
    """The names of the contract by those that Trackio has."""

    def __init__(self) -> None:
        from tests.contracts.test_backends import HOSTILE

        self._known = {metric_name(name): name for name in HOSTILE}

    def __getitem__(self, name: str) -> str:
        return self._known.get(name, name)
