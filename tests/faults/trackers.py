"""The trackers of a training program, as its configuration names them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def backends_of(tracker: str, directory: Path, **more: Any) -> list[Any]:
    """Return the backends; for an attached one the user's own run is opened first."""
    if tracker == "attached wandb":
        wandb: Any = importlib.import_module("wandb")
        wandb.init(project="faults", id="case", dir=str(directory))
        return ["wandb"]
    if tracker == "user's writer":
        tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
        return [{"name": "tensorboard", "writer": tensorboard.SummaryWriter(str(directory / "logs"))}]
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"log_dir": str(directory / "logs")},
        "mlflow": {"tracking_uri": f"sqlite:///{directory}/store.db", "experiment": "faults"},
        "wandb": {"project": "faults", "directory": str(directory), "run_id": "case"},
    }
    return [{"name": tracker, **options[tracker], **more}]
