"""The backends of a run: made from the configuration, opened at the first record, closed once."""

from __future__ import annotations

import inspect
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gradtrack import registry
from gradtrack._version import __version__
from gradtrack.backends.base import Backend
from gradtrack.config import GradientConfig
from gradtrack.errors import InputTypeError, UsageError
from gradtrack.record.delivery import Delivery
from gradtrack.record.files import ensure_writable, new_run_id
from gradtrack.records import Record, RunInfo


class Sink:
    """The way out of a manager: one identity, one run directory, the backends and their delivery."""

    def __init__(self, config: GradientConfig) -> None:
        self.run_id = new_run_id()
        self.backends = build_backends(config.backends)
        if config.run_dir is not None:
            ensure_writable(config.run_dir)
        self._config = config
        self._directory = config.run_dir
        self._delivery: Delivery | None = None

    @property
    def keeps_files(self) -> bool:
        """Whether the run has a directory: it was named, or a backend needs one."""
        return self._config.run_dir is not None or any(not backend.inline for backend in self.backends.values())

    @property
    def directory(self) -> Path | None:
        """Return the run's directory, or None where nothing is written."""
        if self._directory is None and self.keeps_files:
            self._directory = Path("gradtrack_runs") / self.run_id
        return self._directory

    def write(self, record: Record) -> None:
        """Send a record on its way."""
        if self._delivery is None:
            self._delivery = Delivery(
                self.backends, run=self._run_info(), close_timeout_seconds=self._config.close_timeout_seconds
            )
        self._delivery.write(record)

    def flush(self) -> None:
        """Make everything that was written durable."""
        if self._delivery is not None:
            self._delivery.flush()

    def close(self, *, failed: bool) -> None:
        """Let the backends go, also those that never got a record."""
        if self._delivery is not None:
            self._delivery.close(failed=failed)
            return
        for backend in self.backends.values():
            backend.close(failed=failed)

    def status(self) -> dict[str, dict[str, Any]]:
        """Tell what each backend has taken, and what it has not."""
        return {name: {} for name in self.backends} if self._delivery is None else self._delivery.status()

    def _run_info(self) -> RunInfo:
        config = self._config.model_dump(mode="json", exclude_unset=True, exclude={"backends", "analyzers"})
        directory = self.directory
        return RunInfo(
            run_id=self.run_id,
            run_dir=None if directory is None else str(directory),
            created=time.time(),
            config=config,
            environment={
                "gradtrack": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "platform": platform.platform(),
            },
        )


def build_backends(specs: list[Any]) -> dict[str, Backend]:
    """Make the backends that a configuration names; all of them or, where one fails, none."""
    built: dict[str, Backend] = {}
    try:
        for spec in specs:
            name, backend = _build(spec)
            if name in built:
                raise UsageError(f"backend {name!r} is named twice: expected each once. Remove one of them.")
            built[name] = backend
    except BaseException:
        for backend in built.values():
            backend.close(failed=True)
        raise
    return built


def _build(spec: object) -> tuple[str, Backend]:
    named = registry.split_spec(spec, "backend")
    if named is None:
        name, backend = registry.backends.name_of(spec), spec
    else:
        name, options = named
        backend = _construct(name, options)
    if not callable(getattr(backend, "write", None)):
        raise InputTypeError(f"backend {spec!r}: expected a Backend. Derive its class from gradtrack.Backend.")
    if not isinstance(backend, Backend):
        raise InputTypeError(f"backend {spec!r}: expected a subclass of gradtrack.Backend. Derive its class from it.")
    return name, backend


def _construct(name: str, options: Mapping[str, Any]) -> object:
    found = registry.backends.load(name)
    try:
        inspect.signature(found).bind(**options)
    except TypeError as fault:
        expected = ", ".join(inspect.signature(found).parameters) or "none"
        raise UsageError(f"backend {name!r}: {fault}. Its options: {expected}.") from fault
    return found(**options)
