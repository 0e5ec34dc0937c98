"""Records as lines of CSV: step, metric, value."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from gradtrack import Backend
from gradtrack.records import Record


class CsvBackend(Backend):
    """A backend that appends one line per metric to a file."""

    def __init__(self, *, path: str = "gradients.csv") -> None:
        self._path = Path(path).absolute()

    def write(self, records: Sequence[Record]) -> None:
        with self._path.open("a", newline="", encoding="utf-8") as stream:
            lines = csv.writer(stream)
            for record in records:
                lines.writerows((record.step, name, value) for name, value in record.metrics.items())
