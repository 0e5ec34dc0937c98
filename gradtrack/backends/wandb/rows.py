"""How rows join a W&B run whose one step counter belongs to everybody."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, final

from gradtrack.backends.wandb.columns import STEP
from gradtrack.backends.wandb.own_run import RunEnding
from gradtrack.errors import PermanentBackendError
from gradtrack.support.redact import redact

StepMode = Literal["polite", "row", "step"]
_PATIENCE_SECONDS: Final = 0.05
_LONGEST_WAIT_SECONDS: Final = 1.0
_MANY_HELD: Final = 1000


class Rows(ABC):
    """A way into a run; rows that wait are written when the run ends, or at the close where it cannot tell its end."""

    def __init__(self, run: Any, ending: RunEnding | None, tell: Callable[[str], object]) -> None:
        self._run, self._ending, self._tell = run, ending, tell
        self._held: deque[Mapping[str, Any]] = deque()
        self._ended = False
        if ending is not None:
            ending.before(self.finish)

    @abstractmethod
    def write(self, row: Mapping[str, Any], step: int) -> None:
        """Log a row, now or later."""

    def close(self) -> None:
        """Prepare for the end."""
        if self._ending is not None and not self._ending.hooked:
            self.finish()

    def finish(self) -> None:
        """Write what waits."""
        self._ended = True


def rows_of(run: Any, mode: StepMode, ending: RunEnding | None, tell: Callable[[str], object]) -> Rows:
    """Return the way into a run; one without an ending is ours."""
    shared = getattr(getattr(run, "settings", None), "mode", "") == "shared"
    if ending is None or shared or mode == "row":
        return OwnRows(run, None, tell)
    return (StepRows if mode == "step" else PoliteRows)(run, ending, tell)


@final
class OwnRows(Rows):
    """Rows in a run whose step counter is ours, or does not matter."""

    def write(self, row: Mapping[str, Any], step: int) -> None:
        self._run.log(row)


@final
class StepRows(Rows):
    """Rows at their own step of a run of the user's; those that come behind its counter are written when it ends.

    The user may move the counter at any moment: what follows each row tells whether W&B took or dropped it.
    """

    _open: Mapping[str, Any] = MappingProxyType({})
    _open_at = -1

    def write(self, row: Mapping[str, Any], step: int) -> None:
        # A row is left open at its step, or kept: W&B would drop one that is behind.
        _check_open(self._run, ended=self._ended)
        reached = self._run.step
        joins = reached == step == self._open_at
        # Our row that may still be open has other values under the same names.
        replaces = joins and any(name in self._open and self._open[name] != value for name, value in row.items())
        if reached > step or replaces:
            self._held.append(row)
            return
        if reached < step:
            self._run.log(row, step=step)
        else:
            self._run.log(row, commit=False)  # which is not dropped if the counter moves just now
        after = self._run.step
        if reached < step < after and not self._was_taken(row):
            self._held.append(row)
            return
        self._open = {**self._open, **row} if joins else row
        self._open_at = step if reached < step else after

    def _was_taken(self, row: Mapping[str, Any]) -> bool:
        """Look for a row that was logged just before the counter left its step, or just after."""
        return all(self._run.summary.get(name) == value for name, value in row.items() if name.startswith(STEP))

    def finish(self) -> None:
        self._ended = True
        # The row that is open may have columns of ours.
        _log_all(self._run, self._held, self._tell, alone=True)


@final
class PoliteRows(Rows):
    """Rows in a run whose step counter is the user's.

    A row of ours is added to the row that W&B holds open, without committing it. The next one follows only when the
    counter has moved on since then, because then the open row was committed with ours in it: the counter is read after
    our row was added, so a move of the user's in between can only make us wait for another one, never write over a row
    that is still open. Rows that find no open row of the user's are committed when the run ends, after which no step of
    the user's can come too late.
    """

    def __init__(self, run: Any, ending: RunEnding | None, tell: Callable[[str], object]) -> None:
        super().__init__(run, ending, tell)
        self._open_at: int | None = None
        self._waited_at: int | None = None
        self._lock = threading.RLock()

    def write(self, row: Mapping[str, Any], step: int) -> None:
        with self._lock:
            _check_open(self._run, ended=self._ended)
            self._held.append(row)
            try:
                self._offer()
            except BaseException:
                if self._held and self._held[-1] is row:  # it comes again
                    self._held.pop()
                raise
        if len(self._held) > _MANY_HELD:
            self._tell(
                f"more than {_MANY_HELD} rows wait for rows of yours to join; they are written when the run ends. "
                "Set step_mode='row' if you never log with step="
            )

    def _offer(self) -> None:
        """Add held rows one by one, as long as the user's rows keep coming."""
        end = time.monotonic() + _LONGEST_WAIT_SECONDS
        while self._held and self._moved_on(end):
            self._run.log(self._held[0], commit=False)
            self._held.popleft()
            self._open_at = self._run.step

    def _moved_on(self, end: float) -> bool:
        """Say whether our last row was committed; where rows wait in line, wait a moment for it, once at a step."""
        if self._open_at is None:
            return True
        patient = len(self._held) > 1 and self._waited_at != self._open_at
        limit = min(end, time.monotonic() + (_PATIENCE_SECONDS if patient else 0.0))
        pause = 0.001
        while self._run.step <= self._open_at:
            if time.monotonic() >= limit:
                self._waited_at = self._open_at if patient else self._waited_at
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        return True

    def finish(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            try:
                if self._open_at is not None and self._run.step <= self._open_at:
                    self._run.log({}, commit=True)
                self._open_at = None
            except Exception as fault:
                self._tell(f"the open row could not be written at the end ({redact(str(fault))})")
            _log_all(self._run, self._held, self._tell)


def _check_open(run: Any, *, ended: bool) -> None:
    """Refuse a row for good where the run has ended: W&B would be asked for its counter in vain, for seconds."""
    if ended or getattr(run, "_is_finished", False):
        raise PermanentBackendError(
            "wandb: the run is finished: expected it to be open. Close the manager before the run; "
            "`gradtrack replay` delivers the rows that came after."
        )


def _log_all(run: Any, rows: deque[Mapping[str, Any]], tell: Callable[[str], object], *, alone: bool = False) -> None:
    """Commit rows one by one; the first joins what is open, unless it is to be alone."""
    try:
        while rows:
            if alone:
                run.log(rows[0], step=run.step + 1, commit=True)
            else:
                run.log(rows[0])
            rows.popleft()
    except Exception as fault:
        tell(f"{len(rows)} rows could not be written at the end ({redact(str(fault))})")
