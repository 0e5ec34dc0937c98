"""The rows that destinations hold: of each, how often it has which step, and with which norm."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

NORM = "train/grad_norm"
Rows = list[tuple[int, float]]


def in_json(directory: Path) -> Rows:
    """Return the rows of the JSON backend, wherever in a directory its file lies."""
    found: Rows = []
    for path in directory.rglob("gradient_statistics.json"):
        columns = json.loads(path.read_text())
        found += zip(columns["step"], columns["grad_norm"], strict=True)
    return found


def in_tensorboard(directory: Path) -> Rows:
    """Return the rows of all event files in a directory, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Rows = []
    for run in sorted({path.parent for path in directory.rglob("*tfevents*")}):
        reader = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        if NORM in reader.Tags()["scalars"]:
            found += [(event.step, event.value) for event in reader.Scalars(NORM)]
    return found


def in_mlflow(server: str, experiment: str) -> Rows:
    """Return the rows of an experiment."""
    mlflow: Any = importlib.import_module("mlflow")
    client = mlflow.MlflowClient(tracking_uri=server)
    known = client.get_experiment_by_name(experiment)
    runs = [] if known is None else client.search_runs([known.experiment_id])
    return [(point.step, point.value) for run in runs for point in client.get_metric_history(run.info.run_id, NORM)]
