"""The W&B backend under test, in an offline run of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gradtrack.backends.wandb import WandbBackend
from gradtrack.backends.wandb.columns import axis_of, metric_name
from tests.backends.history import messages_of, rows_of
from tests.contracts.harness import Harness


class WandbHarness(Harness):
    """Offline runs of one identity; another instance adds a directory with the rest of the rows."""

    flush_is_durable = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._before = {name: os.environ.get(name) for name in ("WANDB_MODE", "WANDB_SILENT")}
        os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")

    def open(self) -> WandbBackend:
        return WandbBackend(directory=str(self.directory), project="contract", run_id="contract")

    def read(self) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        names: dict[str, str] = {}
        for directory in sorted((self.directory / "wandb").glob("offline-run-*")):
            names.update(_originals(directory))
            for row in rows_of(directory):
                for key, value in row.items():
                    axis = axis_of("critic" if "/critic" in key else "")
                    step = row.get(axis)
                    if step is not None and isinstance(value, (int, float)) and not key.startswith("_"):
                        original = names.get(key, key.replace(":", "."))
                        assert key == axis or metric_name(original) == key, (original, key)
                        found.setdefault(original, []).append((step, value + 0.0))
        return found

    def kept(self, name: str, value: float) -> float | None:
        """Return what comes back: JSON as W&B writes it has no negative zero."""
        return value + 0.0

    def release(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _originals(directory: Path) -> dict[str, str]:
    """Return the names that W&B cannot hold, as the run's configuration tells them."""
    found: dict[str, str] = {}
    for message in messages_of(directory):
        for update in message.config.update:
            if update.key == "gradtrack_names":
                found.update(json.loads(update.value_json))
    return found
