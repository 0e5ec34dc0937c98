"""The end of a W&B run that is not ours to end."""

from __future__ import annotations

import atexit
import importlib
import os
import threading
from collections.abc import Callable
from typing import Any


class Ending:
    """Calls what was asked for, in its order, just before a run ends: by its `finish`, or with the interpreter."""

    def __init__(self, run: Any) -> None:
        self._actions: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._over = False
        self._process = os.getpid()
        self.hooked = self._hook(run)
        """Whether the run tells of its `finish`."""
        # A run that nobody finishes ends with the interpreter, and its own way out does not ask us.
        atexit.register(self.come)

    def before(self, action: Callable[[], object]) -> None:
        """Call something before the run ends; it must not raise."""
        self._actions.append(action)

    def before_others(self, action: Callable[[], object]) -> None:
        """Call something before all the rest; it must not raise."""
        self._actions.insert(0, action)

    def come(self) -> None:
        """Call everything, the first time only; a forked copy of the process has no part in the run."""
        if os.getpid() != self._process:
            return
        with self._lock:
            over, self._over = self._over, True
        atexit.unregister(self.come)
        for action in () if over else self._actions:
            action()

    def _hook(self, run: Any) -> bool:
        try:
            module = importlib.import_module("wandb.sdk.wandb_run")
            run._teardown_hooks.append(module.TeardownHook(self.come, module.TeardownStage.EARLY))
        except Exception:
            return False
        return True
