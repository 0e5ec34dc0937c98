"""A W&B run of our own, beside any other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradtrack.records import RunInfo
from gradtrack.redact import redact


def project_of(options: Mapping[str, Any]) -> str:
    """Return the project in which a run of our own is opened."""
    return options["project"] or os.environ.get("WANDB_PROJECT") or "gradtrack"


def open_run(package: Any, given: Mapping[str, Any], info: RunInfo | None, tell: Callable[[str], object]) -> Any:
    """Open a run of our own; one that cannot reach the server is kept on disk."""
    options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    options["project"] = project_of(given)
    if "id" in options and os.environ.get("WANDB_MODE") != "offline":
        options["resume"] = "allow"
    if info is not None:
        options["config"] = {"gradtrack": {"run_id": info.run_id, **info.config}}
        if info.run_dir is not None and "dir" not in options:
            Path(info.run_dir).mkdir(parents=True, exist_ok=True)
            options["dir"] = info.run_dir
    settings = _settings(package)
    try:
        return package.init(reinit="create_new", settings=settings, **options)
    except (package.errors.CommError, package.errors.UsageError) as fault:
        tell(f"the server cannot be used ({redact(str(fault))}); the run is kept offline, for `wandb sync`")
        options.pop("resume", None)
        return package.init(reinit="create_new", mode="offline", settings=settings, **options)


def _settings(package: Any) -> Any:
    try:
        # A killed process loses what was not flushed; the default is 15 seconds.
        return package.Settings(x_transaction_log_flush_interval=1.0, init_timeout=30)
    except Exception:  # an older version has no such setting
        return package.Settings()
