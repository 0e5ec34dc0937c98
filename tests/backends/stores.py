"""Stores of MLflow and of Trackio for the tests."""

from __future__ import annotations

import atexit
import functools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@functools.cache
def empty_store() -> Path:
    """Make a sqlite store with MLflow's tables once, to be copied: laying them out takes longer than a test."""
    from mlflow import MlflowClient

    directory = Path(tempfile.mkdtemp(prefix="gradtrack-store-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    MlflowClient(tracking_uri=f"sqlite:///{directory}/empty.db").search_experiments()
    return directory / "empty.db"


@contextmanager
def moved_trackio(directory: Path) -> Iterator[None]:
    """Let Trackio keep its runs in a directory, which it reads from the environment when it is imported."""
    import trackio

    before = trackio.utils.TRACKIO_DIR
    found = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "trackio"]
    held = [module for module in found if getattr(module, "TRACKIO_DIR", None) == before]
    for module in held:
        module.TRACKIO_DIR = directory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in held:
            module.TRACKIO_DIR = before  # type: ignore[attr-defined]
