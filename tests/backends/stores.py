"""MLflow stores for the tests."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path


@functools.cache
def empty_store() -> Path:
    """Make a sqlite store with MLflow's tables once, to be copied: laying them out takes longer than a test."""
    from mlflow import MlflowClient

    directory = Path(tempfile.mkdtemp(prefix="gradtrack-store-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    MlflowClient(tracking_uri=f"sqlite:///{directory}/empty.db").search_experiments()
    return directory / "empty.db"
