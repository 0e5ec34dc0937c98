"""W&B runs of our own beside any other, and the end of runs that are not ours to end."""

from __future__ import annotations

import atexit
import importlib
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies

from gradtrack.delivery.at_exit import come_first
from gradtrack.delivery.locks import unforked
from gradtrack.records import RunInfo
from gradtrack.support.names import digest_of
from gradtrack.support.redact import redact


class RunEnding:
    """Calls what was asked for, in its order, just before a run ends: by its `finish`, or with the interpreter."""

    def __init__(self, run: Any) -> None:
        self._actions: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._over = False
        self._process = os.getpid()
        self.hooked = True
        """Whether the run tells of its `finish`."""
        try:
            module = importlib.import_module("wandb.sdk.wandb_run")
            run._teardown_hooks.append(module.TeardownHook(self.come, module.TeardownStage.EARLY))
        except Exception:
            self.hooked = False
        # A run without a call of its `finish` ends with the interpreter, and its own way out does not ask us.
        atexit.register(self.come)

    def before(self, action: Callable[[], object], *, first: bool = False) -> None:
        """Call something before the run ends, or before all the rest as well; it must not raise."""
        self._actions.insert(0 if first else len(self._actions), action)

    def come(self) -> None:
        """Call everything, the first time only; a forked copy of the process has no part in the run."""
        if os.getpid() != self._process:
            return
        with self._lock:
            over, self._over = self._over, True
        atexit.unregister(self.come)
        for action in () if over else self._actions:
            action()


_CONNECT_SECONDS: Final = 5.0


def project_of(options: Mapping[str, Any]) -> str:
    """Return the project in which a run of our own is opened."""
    return options["project"] or os.environ.get("WANDB_PROJECT") or "gradtrack"


def place_of(given: Mapping[str, Any], info: RunInfo) -> dict[str, Any]:
    """Return the identity and the directory of a run of our own, where they are not given: those of the training.

    So a replay finds it again, also after a process that was killed before it could note where its rows went.
    """
    identity = os.environ.get("WANDB_RUN_ID") or digest_of(info.run_id)
    return {"id": given["id"] or identity, "dir": given["dir"] or info.run_dir}


def open_run(package: Any, given: Mapping[str, Any], info: RunInfo | None, tell: Callable[[str], object]) -> Any:
    """Open a run of our own; one that cannot reach the server is kept on disk."""
    options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    options["project"] = project_of(given)
    if info is not None:
        options["config"] = {"gradtrack": {"run_id": info.run_id, **info.config}}
    if "dir" in options:
        Path(options["dir"]).mkdir(parents=True, exist_ok=True)
    with unforked():  # a copy made meanwhile would remove, when it exits, the directory in which W&B starts its process
        package.setup()
    come_first()
    # A user who sets the variable also says whether that run is to be resumed.
    if options.get("id") not in (None, os.environ.get("WANDB_RUN_ID")) and _talks(package):
        options["resume"] = "allow"
    try:
        # A killed process loses what was not flushed; the default is 15 seconds.
        settings = package.Settings(x_transaction_log_flush_interval=1.0, init_timeout=30)
    except Exception:  # an older version has no such setting
        settings = package.Settings()
    reason = _out_of_reach(package)
    if reason is None:
        try:
            return package.init(reinit="create_new", settings=settings, **options)
        except (package.errors.CommError, package.errors.UsageError) as fault:
            reason = str(fault)
    tell(f"the server cannot be used ({redact(reason)}); the run is kept offline, for `wandb sync`")
    options.pop("resume", None)
    return package.init(reinit="create_new", mode="offline", settings=settings, **options)


def _out_of_reach(package: Any) -> str | None:
    """Say why the server cannot be connected to, where that is certain at once: W&B would try for half a minute."""
    parts = urlsplit(str(package.setup().settings.base_url))
    if not _talks(package) or parts.hostname is None or {"http", "https", "all"} & set(getproxies()):
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname, port), timeout=_CONNECT_SECONDS):
            return None
    except OSError as fault:
        return f"{parts.hostname}:{port}: {fault.strerror or fault}"


def _talks(package: Any) -> bool:
    """Say whether W&B is to talk to its server."""
    return package.setup().settings.mode in ("online", "shared", None)
