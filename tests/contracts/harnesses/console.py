"""The lines on the console under test."""

from __future__ import annotations

import io
import re
from pathlib import Path

from gradtrack.backends.console import ConsoleBackend
from tests.contracts.harness import Harness

_LINE = re.compile(r"step (-?\d+)( \w+)?: gradient norm (\S+?)(?:,.*)?$")


class ConsoleHarness(Harness):
    """Reads the norm of every line; four digits of it are printed."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.stream = io.StringIO()

    def open(self) -> ConsoleBackend:
        return ConsoleBackend(self.stream)

    def read(self) -> dict[str, list[tuple[int, float]]]:
        rows: dict[str, list[tuple[int, float]]] = {}
        for line in self.stream.getvalue().splitlines():
            if found := _LINE.match(line):
                name = f"train/grad_norm/{found[2].strip()}" if found[2] else "train/grad_norm"
                rows.setdefault(name, []).append((int(found[1]), float(found[3])))
        return rows

    def kept(self, name: str, value: float) -> float | None:
        return float(f"{value:.4g}") if name in ("train/grad_norm", "train/grad_norm/critic") else None
