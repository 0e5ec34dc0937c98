"""The MLflow backend under test, on a sqlite store of its own."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from gradtrack.backends.mlflow import MlflowBackend
from gradtrack.backends.mlflow.store import metric_name
from tests.backends.stores import empty_store
from tests.contracts.harness import Harness

LARGEST = 1.7976931348623157e308


class MlflowHarness(Harness):
    """A run of a store that is a copy of an empty one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        shutil.copy(empty_store(), directory / "store.db")
        self.uri = f"sqlite:///{directory}/store.db"

    def open(self) -> MlflowBackend:
        return MlflowBackend(tracking_uri=self.uri, experiment="contract")

    def read(self) -> dict[str, list[tuple[int, float]]]:
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)
        experiment = client.get_experiment_by_name("contract")
        if experiment is None:
            return {}
        (run,) = client.search_runs([experiment.experiment_id])
        return {
            _original(name, run.data.tags): [
                (point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)
            ]
            for name in run.data.metrics
        }

    def kept(self, name: str, value: float) -> float | None:
        """Return the largest number for an infinity, as MLflow stores it; sqlite has no negative zero."""
        return math.copysign(LARGEST, value) if math.isinf(value) else value + 0.0


def _original(name: str, tags: dict[str, str]) -> str:
    original = tags.get(f"gradtrack.name.{name[-12:]}", name)
    assert metric_name(original) == name
    return original
