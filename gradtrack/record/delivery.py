"""The way of a record to the backends."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from gradtrack.backends.base import Backend
from gradtrack.records import Record, RunInfo

_logger = logging.getLogger("gradtrack")


class Delivery:
    """Hands every record to every backend; a backend that fails never stops the training."""

    def __init__(self, backends: Mapping[str, Backend], *, run: RunInfo, close_timeout_seconds: float = 10.0) -> None:
        self.backends = dict(backends)
        self._run: RunInfo | None = run
        self._faults: dict[str, str] = {}
        self._lost: dict[str, int] = dict.fromkeys(self.backends, 0)

    def write(self, record: Record) -> None:
        """Deliver one record; the first one carries the run."""
        if self._run is not None:
            record, self._run = dataclasses.replace(record, run=self._run), None
        for name, backend in self.backends.items():
            try:
                backend.write([record])
            except Exception as fault:
                self._note(name, fault)

    def flush(self) -> None:
        """Make everything that was delivered durable."""
        for name, backend in self.backends.items():
            try:
                backend.flush()
            except Exception as fault:
                self._note(name, fault)

    def close(self, *, failed: bool = False) -> None:
        """Let every backend go."""
        for name, backend in self.backends.items():
            try:
                backend.close(failed=failed)
            except Exception as fault:
                self._note(name, fault)

    def status(self) -> dict[str, dict[str, object]]:
        """Tell for each backend what it did not take, and why."""
        return {name: {"lost": self._lost[name], "fault": self._faults.get(name)} for name in self.backends}

    def _note(self, name: str, fault: Exception) -> None:
        self._lost[name] += 1
        if self._faults.get(name) != repr(fault):
            self._faults[name] = repr(fault)
            _logger.warning("backend %s failed: %r", name, fault)
