"""The JSON files under test."""

from __future__ import annotations

import json
import re

from gradtrack.backends.json import JsonBackend
from tests.contracts.harness import Harness

_PLACE = re.compile(r"train/grad_(variance|mean|norm|max|min)(/critic)?")


class JsonHarness(Harness):
    """Reads the seven columns of each file back under the names of the metrics."""

    def open(self) -> JsonBackend:
        return JsonBackend(self.directory / "files")

    def read(self) -> dict[str, list[tuple[int, float]]]:
        rows: dict[str, list[tuple[int, float]]] = {}
        for path in (self.directory / "files").glob("gradient_statistics*.json"):
            tail = "/critic" if ".critic" in path.name else ""
            columns = json.loads(path.read_text())
            if "step" not in columns:
                continue
            for name in ("variance", "mean", "norm", "max", "min"):
                rows[f"train/grad_{name}{tail}"] = list(zip(columns["step"], columns[f"grad_{name}"], strict=True))
        return rows

    def kept(self, name: str, value: float) -> float | None:
        return value if _PLACE.fullmatch(name) else None
