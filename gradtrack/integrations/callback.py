"""The base of the frameworks' callbacks: a manager for one training, who clips, and the trackers that are joined."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from gradtrack import registry
from gradtrack.config import GradientConfig, explicit
from gradtrack.errors import UsageError
from gradtrack.integrations.patching import embrace
from gradtrack.loop import only_as_asked
from gradtrack.manager import GradientManager
from gradtrack.reports import StepReport
from gradtrack.step.pair import IssueCallback
from gradtrack.step.unused_settings import CLIPPING, changed_settings
from gradtrack.support.interrupts import Changes
from gradtrack.support.rank import process_rank

Source = GradientConfig | Mapping[str, Any] | str | Path | None
_logger = logging.getLogger("gradtrack")


class ManagedTraining:
    """A framework's training with a manager of its own, and the changes that are undone when it is over.

    A framework does not tell its callbacks of a training that fails before it has begun, as in another callback. Hooks
    therefore ask `_awake`: they do nothing outside the methods that `_embrace` names, until `_stop`.
    """

    _begins_with: ClassVar[str]

    def _prepare(self, config: GradientConfig, on_issue: IssueCallback | None) -> None:
        self._config, self._on_issue = config, on_issue
        self._manager: GradientManager | None = None
        self._changes = Changes()
        self._awake = True

    def __getstate__(self) -> dict[str, Any]:
        """Leave the manager out of a copy, with its files and threads: a copy has a training of its own to begin."""
        return {**vars(self), "_manager": None, "_changes": Changes(), "_awake": True}

    @property
    def manager(self) -> GradientManager:
        """Return the manager of the training; it exists from the moment the training begins."""
        if self._manager is None:
            raise UsageError(
                f"manager: expected a training that has begun. Read it during or after {self._begins_with}."
            )
        return self._manager

    @property
    def reports(self) -> list[StepReport]:
        """Return the last reports, the newest last; none before the training."""
        return [] if self._manager is None else self._manager.reports

    def _begin(self, config: GradientConfig, state: Mapping[str, Any] | None) -> GradientManager:
        """Make the manager of a training, and load the state that a checkpoint kept."""
        manager = self._manager = GradientManager(config)
        if self._on_issue is not None:
            manager.on_issue(self._on_issue)
        if state:
            manager.load_state_dict(state)
        return manager

    def _stop(self, *, failed: bool = False) -> None:
        """Remove every hook and close the manager, which delivers the remaining rows."""
        try:
            with self._changes:
                self._awake = True
        finally:
            if self._manager is not None:
                self._manager.close(failed=failed)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Stop as failed when an exception passes, because the framework does not tell its callbacks of one."""
        try:
            yield
        except BaseException:
            self._stop(failed=True)
            raise

    @contextmanager
    def _in_training(self) -> Iterator[None]:
        with self._failing():
            awake, self._awake = self._awake, True
            try:
                yield
            finally:
                self._awake = awake or not self._changes

    def _embrace(self, owner: Any, names: Iterable[str]) -> list[str]:
        """Be awake in these methods only, as far as they are there, and end with an exception out of them."""
        parts = [name for name in names if hasattr(owner, name)]
        for name in parts:
            embrace(self._changes, owner, name, self._in_training)
        self._awake = not parts
        return parts


def clipping_if_asked(config: GradientConfig, *, clips: str) -> GradientConfig:
    """Return the configuration; it only measures unless the user has asked for clipping and the framework does none.

    Where the framework clips, `clips` says so for the settings of our own clipping, which have no effect then.
    """
    if not clips:
        return only_as_asked(config)
    values, changed = explicit(config), changed_settings(config)
    for name in CLIPPING if process_rank() == 0 else ():
        if name in changed:
            _logger.warning("%s=%r has no effect: %s", name, values[name], clips)
    values = {name: value for name, value in values.items() if name not in CLIPPING}
    return only_as_asked(GradientConfig(**{**values, "enable_gradient_clipping": False}))


def joined(
    config: GradientConfig, defaults: Sequence[str], join: Callable[[str], Mapping[str, Any] | None]
) -> GradientConfig:
    """Return the configuration with its backends in the framework's own runs.

    Without any backends in it, `defaults` are taken. `join` gives the options that lead a backend, which is named
    without options, into the framework's run.
    """
    specs: list[Any] = list(config.backends) if "backends" in config.model_fields_set else list(defaults)
    found = []
    for spec in specs:
        named = registry.split_spec(spec, "backend")
        options = join(named[0]) if named is not None and not named[1] else None
        found.append(spec if named is None or not options else {"name": named[0], **options})
    return GradientConfig.load(config, backends=found)
