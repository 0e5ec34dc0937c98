"""The memory backend under test."""

from __future__ import annotations

from pathlib import Path

from gradtrack.backends.memory import MemoryBackend
from tests.contracts.harness import Harness


class MemoryHarness(Harness):
    """Reads the records of every backend that it made."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.made: list[MemoryBackend] = []

    def open(self) -> MemoryBackend:
        self.made.append(MemoryBackend())
        return self.made[-1]

    def read(self) -> dict[str, list[tuple[int, float]]]:
        rows: dict[str, list[tuple[int, float]]] = {}
        for record in (record for backend in self.made for record in backend.records):
            for name, value in record.metrics.items():
                rows.setdefault(name, []).append((record.step, value))
        return rows
