"""What the callbacks of all frameworks have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from gradtrack.config import GradientConfig
from gradtrack.errors import UsageError
from gradtrack.integrations.patching import embrace
from gradtrack.manager import GradientManager
from gradtrack.reports import StepReport
from gradtrack.step.pair import IssueCallback


class ManagedTraining:
    """A framework's training with a manager of its own, and with what undoes our hooks when it is over.

    Where the training fails before it has begun, as in another callback, nobody tells us: hooks that ask `_awake` are
    inert outside the methods that `_embrace` names, until `_stop`.
    """

    _begins_with: ClassVar[str]

    def _prepare(self, config: GradientConfig, on_issue: IssueCallback | None) -> None:
        self._config, self._on_issue = config, on_issue
        self._manager: GradientManager | None = None
        self._undo: list[Callable[[], object]] = []
        self._awake = True

    @property
    def manager(self) -> GradientManager:
        """Return the manager of the training, which begins with the training itself."""
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
        """Make the manager of a training, with what an earlier one remembers."""
        manager = self._manager = GradientManager(config)
        if self._on_issue is not None:
            manager.on_issue(self._on_issue)
        if state:
            manager.load_state_dict(state)
        return manager

    def _stop(self, *, failed: bool = False) -> None:
        """Take everything off that was hooked, and deliver what is left."""
        for undo in self._undo:
            undo()
        self._undo, self._awake = [], True
        if self._manager is not None:
            self._manager.close(failed=failed)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """End with an exception, of which the framework tells its callbacks nothing."""
        try:
            yield
        except BaseException:
            self._stop(failed=True)
            raise

    @contextmanager
    def _in_training(self) -> Iterator[None]:
        awake, self._awake = self._awake, True
        try:
            with self._failing():
                yield
        finally:
            self._awake = awake or not self._undo

    def _embrace(self, owner: Any, names: Iterable[str]) -> list[str]:
        """Be awake in these methods only, as far as they are there, and end with an exception out of them."""
        parts = [name for name in names if hasattr(owner, name)]
        self._undo += [embrace(owner, name, self._in_training) for name in parts]
        self._awake = not parts
        return parts
