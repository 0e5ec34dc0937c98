"""The backend that calls a function under test."""

from __future__ import annotations

from pathlib import Path

from gradtrack.backends.callable import CallableBackend
from tests.contracts.harness import Harness


class CallableHarness(Harness):
    """Keeps what the function was called with."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.rows: dict[str, list[tuple[int, float]]] = {}

    def open(self) -> CallableBackend:
        return CallableBackend(log=self.log)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Take a row, as a tracker would."""
        for name, value in metrics.items():
            self.rows.setdefault(name, []).append((step, value))

    def read(self) -> dict[str, list[tuple[int, float]]]:
        return self.rows
