"""Records as TensorBoard event files, in a directory of their own or through the user's SummaryWriter."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, final

from gradtrack.backends.base import Backend
from gradtrack.backends.tensorboard.events import Events, image_event, image_tag, layout_event, tag_of
from gradtrack.backends.tensorboard.files import EventFile, Index, read_tags
from gradtrack.backends.tensorboard.user_run import UserRun
from gradtrack.delivery.locks import Claim, claim_or_own, is_same, own_directory
from gradtrack.delivery.run_files import files_to_show
from gradtrack.errors import ClosedError, UsageError
from gradtrack.records import Panel, Record, RunInfo
from gradtrack.support.redact import redact

_SUB_RUN: Final = "gradtrack"
_LATE_RUN: Final = "gradtrack-late"
_NOTHING: Final[frozenset[str]] = frozenset()
_logger = logging.getLogger("gradtrack")


@final
class TensorBoardBackend(Backend):
    """A backend for TensorBoard that has every record in the file when `write` returns.

    With `writer`, the scalars join the user's own run; the writer is flushed and never closed. Otherwise they go to
    event files in `log_dir`, which is `tensorboard` in the run directory unless it is given. The layout of the panels
    and the pictures of the run go to the sub-run `gradtrack` in both cases. A value is stored as a float, with a double
    beside it where a float would overflow or underflow. The metrics in `withhold` are left out, for those that
    another callback writes to the same run. A `log_dir` that another run of gradtrack writes to is left to it, since
    TensorBoard would draw both as one: this one is then a run of its own inside, named by its identity.
    """

    def __init__(
        self, *, log_dir: str | Path | None = None, writer: Any = None, withhold: Collection[str] = ()
    ) -> None:
        if log_dir is not None and writer is not None:
            raise UsageError("tensorboard: log_dir and writer were given: expected one of them. Leave log_dir out.")
        self._events = Events()
        self._withheld = frozenset(withhold)
        self._writer = None if writer is None else UserRun(writer)
        directory = log_dir if self._writer is None else self._writer.directory
        self._directory = None if directory is None else Path(directory).absolute()
        self._claim: Claim | None = None
        self._home = self._directory
        self._run: UserRun | EventFile | None = self._writer
        self._late: EventFile | None = None
        self._layout: EventFile | None = None
        self._panels: list[Panel] = []
        self._run_id = ""
        self._index = Index()
        self._reached: dict[str, int] = {}
        self._info: RunInfo | None = None
        self._named: dict[str, None] = {}
        self._last_step = 0
        self._wrote = False
        self._issues: dict[str, tuple[str, ...]] = {}
        self._closed = False

    def write(self, records: Sequence[Record]) -> None:
        if self._closed:
            raise ClosedError("tensorboard backend: it is closed. Make a new one for another run.")
        for record in records:
            if record.run is not None:
                self._open(record.run)
        panels = [panel for record in records for panel in record.panels if panel not in self._panels]
        late = [record for record in records if record.step <= self._reached.get(record.source, -1)]
        on_time = [record for record in records if record not in late] if late else records
        run, late_run, layout = self._opened()
        run.append([(record.identity, self._event(record)) for record in on_time])
        late_run.append([(record.identity, self._event(record)) for record in late])
        for record in records:
            self._wrote, self._last_step = True, max(self._last_step, record.step)
            self._named.update(dict.fromkeys(record.files))
        if panels:
            layout.append([(None, layout_event(self._events, [*self._panels, *panels], time.time()))])
            self._panels += panels

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._show()
        except Exception as fault:
            _logger.warning("tensorboard: the pictures of the run could not be shown (%s)", redact(str(fault)))
        if self._claim is not None:
            self._claim.release()
        if self._writer is not None and not self._writer.closed:
            self._writer.flush()

    def address(self) -> dict[str, Any]:
        withheld = {"withhold": sorted(self._withheld)} if self._withheld else {}
        return withheld if self._directory is None else {"log_dir": str(self._directory), **withheld}

    @classmethod
    def probe(cls, **options: Any) -> str:
        backend = cls(**options)
        if backend._writer is not None:
            return f"the SummaryWriter of {backend._directory}"
        return f"event files in {backend._directory or 'tensorboard in the run directory'}"

    def present(self, records: Sequence[Record]) -> set[tuple[str, int]] | None:
        for record in records:
            if record.run is not None:
                self._open(record.run)
        if self._home is None or (self._writer is not None and not self._writer.keeps_identity):
            return None
        homes = (self._home, own_directory(self._home, self._run_id)) if self._run_id else (self._home,)
        there = self._index.read([home / late for home in homes for late in ("", _LATE_RUN)], self._run_id)
        for source, step in self._index.reached.items():
            self._reached[source] = max(step, self._reached.get(source, -1))
        return {
            (record.source, record.step)
            for record in records
            if there.get((record.source, record.step, record.time), _NOTHING) > self._tags_of(record)
        }

    def _tags_of(self, record: Record) -> set[str]:
        return {tag_of(name) for name in record.metrics if name not in self._withheld}

    def _open(self, run: RunInfo) -> None:
        self._info, self._run_id = run, run.run_id
        if self._directory is None:
            parent = Path(run.run_dir) if run.run_dir else Path("gradtrack_runs") / run.run_id
            self._home = self._directory = (parent / "tensorboard").absolute()

    def _opened(self) -> tuple[UserRun | EventFile, EventFile, EventFile]:
        if self._directory is None:
            self._home = self._directory = Path("gradtrack_runs", "tensorboard").absolute()
        run_dir = None if self._info is None else self._info.run_dir
        if self._run is None and self._run_id and not is_same(self._directory, run_dir):
            self._directory, self._claim = claim_or_own(self._directory, self._run_id, what="tensorboard: log_dir")
        if self._run is None:
            self._run = EventFile(self._directory, self._events)
        if self._late is None:
            self._late = EventFile(self._directory / _LATE_RUN, self._events)
        if self._layout is None:
            self._layout = EventFile(self._directory / _SUB_RUN, self._events)
        return self._run, self._late, self._layout

    def _show(self) -> None:
        """Put the pictures of the run beside the layout, each once."""
        if not self._wrote:
            return
        layout = self._opened()[2]
        pictures = [found for found in files_to_show(self._info, self._named) if found[0].suffix == ".png"]
        there = read_tags(layout.directory, self._run_id) if pictures else set()
        pictures = [found for found in pictures if image_tag(found[0]) not in there]
        if pictures:
            event = image_event(self._events, pictures, run_id=self._run_id, step=self._last_step, now=time.time())
            layout.append([(None, event)])

    def _event(self, record: Record) -> Any:
        if not self._withheld.isdisjoint(record.metrics):
            metrics = {name: value for name, value in record.metrics.items() if name not in self._withheld}
            record = dataclasses.replace(record, metrics=metrics)
        return self._events.of(record, self._run_id, self._new_issues(record))

    def _new_issues(self, record: Record) -> tuple[str, ...]:
        """Return the open issues as text, where they are not those of the record before."""
        lines = tuple(f"**{issue.get('severity')}** {issue.get('message')}" for issue in record.issues)
        if not record.tells_health or lines == self._issues.get(record.source, ()):
            return ()
        self._issues[record.source] = lines
        return lines or ("no open issue",)
