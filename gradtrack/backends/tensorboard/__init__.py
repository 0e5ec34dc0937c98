"""Records as TensorBoard event files, in a directory of their own or through the user's SummaryWriter."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, final

from gradtrack.backends.base import Backend, RunParts
from gradtrack.backends.tensorboard.events import Events, image_event, image_tag, layout_event, tag_of
from gradtrack.backends.tensorboard.files import EventFile, Index, UserRun, read_tags
from gradtrack.delivery.locks import Claim, claim_or_own, is_same, own_directory
from gradtrack.delivery.run_files import files_to_show
from gradtrack.errors import ClosedError, UsageError
from gradtrack.records import Panel, Record
from gradtrack.support.redact import redact

_LATE_RUN: Final = "gradtrack-late"
_logger = logging.getLogger("gradtrack")


@final
class TensorBoardBackend(Backend):
    """A backend for TensorBoard that has every record in the file when `write` returns.

    With `writer`, the scalars join the user's own run; the writer is flushed and never closed. Otherwise they go to
    event files in `log_dir`, which is `tensorboard` in the run directory unless it is given. The layout of the panels
    goes to the sub-run `gradtrack` in both cases, and so do the pictures where there is no writer of torch's. A value
    is stored as a float, with a double beside it where a float would overflow or underflow. The metrics in `withhold`
    are left out, for those that another callback writes to the same run. A `log_dir` that another run of gradtrack
    writes to is left to it, since TensorBoard would draw both as one: this one is then a run of its own inside, named
    by its identity.
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
        self._files: tuple[UserRun | EventFile, EventFile, EventFile] | None = None
        self._parts = RunParts()
        self._drawn: dict[Panel, None] = {}
        self._continues = False
        """Whether rows of the run may have been written by another process."""
        self._run_id = ""
        self._index = Index()
        self._reached: dict[str, int] = {}
        self._last_step = 0
        self._wrote = False
        self._issues: dict[str, tuple[str, ...]] = {}
        self._closed = False

    def write(self, records: Sequence[Record]) -> None:
        if self._closed:
            raise ClosedError("tensorboard backend: it is closed. Make a new one for another run.")
        self._parts.take(records)
        self._open()
        late = [record for record in records if record.step <= self._reached.get(record.source, -1)]
        on_time = [record for record in records if record not in late] if late else records
        run, late_run, layout = self._opened()
        run.append([(record.identity, self._event(record)) for record in on_time])
        late_run.append([(record.identity, self._event(record)) for record in late])
        self._wrote = self._wrote or bool(records)
        self._last_step = max([self._last_step, *(record.step for record in records)])
        drawn = dict.fromkeys(panel for panel in self._parts.panels if self._has_data(panel, records))
        if len(drawn) > len(self._drawn):
            layout.append([(None, layout_event(self._events, drawn, time.time()))])
            self._drawn = drawn

    def _has_data(self, panel: Panel, records: Sequence[Record]) -> bool:
        """Say whether a panel has a curve; of a run that goes on, an earlier process may have written it."""
        known = self._continues or bool(self._parts.run and self._parts.run.resumed_from) or panel in self._drawn
        return known or any(panel.has_data(record.metrics) for record in records)

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
        self.flush()

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
        self._continues = True
        self._parts.run = next((record.run for record in records if record.run is not None), self._parts.run)
        self._open()
        if self._home is None or (self._writer is not None and not self._writer.keeps_identity):
            return None
        homes = (self._home, own_directory(self._home, self._run_id)) if self._run_id else (self._home,)
        there = self._index.read([home / late for home in homes for late in ("", _LATE_RUN)], self._run_id)
        for source, step in self._index.reached.items():
            self._reached[source] = max(step, self._reached.get(source, -1))
        return {
            (record.source, record.step)
            for record in records
            if there.get((record.source, record.step, record.time), frozenset())
            > {tag_of(name) for name in record.metrics if name not in self._withheld}
        }

    def _open(self) -> None:
        run = self._parts.run
        if run is not None:
            self._run_id = run.run_id
            if self._directory is None:
                parent = Path(run.run_dir) if run.run_dir else Path("gradtrack_runs") / run.run_id
                self._home = self._directory = (parent / "tensorboard").absolute()

    def _opened(self) -> tuple[UserRun | EventFile, EventFile, EventFile]:
        """Return what takes the rows, those behind their step, and the layout with the pictures."""
        if self._files is None:
            if self._directory is None:
                self._home = self._directory = Path("gradtrack_runs", "tensorboard").absolute()
            run_dir = None if self._parts.run is None else self._parts.run.run_dir
            if self._writer is None and self._run_id and not is_same(self._directory, run_dir):
                self._directory, self._claim = claim_or_own(self._directory, self._run_id, what="tensorboard: log_dir")
            late, layout = (EventFile(self._directory / name, self._events) for name in (_LATE_RUN, "gradtrack"))
            self._files = self._writer or EventFile(self._directory, self._events), late, layout
        return self._files

    def _show(self) -> None:
        """Put the pictures of the run into the user's own, where it takes them, or beside the layout, each once."""
        if not self._wrote:
            return
        run, _, layout = self._opened()
        pictures = [found for found in files_to_show(self._parts.run, self._parts.files) if found[0].suffix == ".png"]
        places = [layout.directory, *([self._home] if self._continues and self._home else [])]
        there = {tag for place in places for tag in read_tags(place, self._run_id)} if pictures else set()
        pictures = [found for found in pictures if image_tag(found[0]) not in there]
        if pictures:
            events = [
                (one[0], image_event(self._events, [one], run_id=self._run_id, step=self._last_step, now=time.time()))
                for one in pictures
            ]
            taken = self._writer is not None and self._writer.keeps_identity and not self._writer.closed
            (run if taken else layout).append(events)  # one each, since a reader bounds the size of an event

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
