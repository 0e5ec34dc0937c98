"""Rows of a journal brought to where they are missing."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gradtrack import registry
from gradtrack.backends.base import Backend, Outcome, address_of
from gradtrack.delivery.destinations import describe_destination, settle
from gradtrack.delivery.journal.offsets import Offsets, offsets_path, read_offsets
from gradtrack.delivery.journal.reading import SavedJournal, journals_below, open_run
from gradtrack.delivery.journal.writing import alone_with
from gradtrack.delivery.locks import Claim
from gradtrack.delivery.run import build, moved_along, without_hidden
from gradtrack.delivery.run_files import RUN_END, RunEnd
from gradtrack.delivery.status import describe
from gradtrack.delivery.writer import Row, Writer
from gradtrack.errors import JournalError, PermanentBackendError, PluginError, UsageError

Progress = Callable[[str, int, int], object]
_logger = logging.getLogger("gradtrack")
_PART_ROWS: Final = 500
_DELAYS_SECONDS: Final = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay did for one backend of one run: how many rows there are, and what became of them.

    Those of `rows` that are neither `present` nor delivered nor refused are `waiting` in the journal. Of rows that a
    replay did not reach, those count as present that the tracker has acknowledged during the run.
    `destination` says where they went, `fault` why it ended early, `damaged` what in the journal could not be read, and
    `status` what the tracker now says of a run that gradtrack had begun there and that was still open.
    """

    run_id: str
    backend: str
    rows: int = 0
    present: int = 0
    delivered: int = 0
    refused: int = 0
    fault: str | None = None
    damaged: tuple[str, ...] = ()
    status: str = ""
    destination: str = field(default="", compare=False)

    @property
    def complete(self) -> bool:
        """Whether the destination now has every row that the journal has."""
        return self.fault is None and not self.refused

    @property
    def waiting(self) -> int:
        """Count the rows that are still to be delivered."""
        return self.rows - self.present - self.delivered - self.refused

    def __str__(self) -> str:
        text = f"{self.backend}: {self.rows} rows, {self.present} were there, {self.delivered} delivered, "
        text += f"{self.refused} refused" + f", {self.waiting} wait" * bool(self.waiting)
        text += f" ({self.fault})" if self.fault else ""
        if self.status:
            text += f"; its run is now {self.status}"
        if self.damaged:
            text += f"; {len(self.damaged)} line(s) of the journal left out: {self.damaged[0]}"
        return text


def replay(
    run_dir: str | Path,
    *,
    to: str | None = None,
    tracking_uri: str | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], object] | None = None,
    allowed: Sequence[str | Path] = (),
) -> list[Replayed]:
    """Deliver what the trackers of the runs of a directory are missing, each row once, however often it is called.

    `RUN_DIR@2` is its second run alone; one in a directory of its own inside that is still being written is left out.
    `to` chooses one backend, also one that the run did not have. Its options are those of the run, without secrets,
    with `tracking_uri` and `options` over them; credentials come from the environment. A server that only the journal
    names gets rows where it is on this machine or the environment names it as well: it could be any stranger's.
    Files are written in the run's directory, and in one that the journal names only where it lies below one `allowed`.
    `tell(text)` is called with where rows go before any is sent, and `progress(backend, done, total)` as rows are
    settled.
    """
    directory, is_one = Path(run_dir), "@" in str(run_dir) and not os.path.lexists(run_dir)
    if not is_one and not os.path.isdir(directory):
        raise JournalError(f"{str(run_dir)!r} is not a directory: expected a run's directory. Check the path.")
    found = open_run(run_dir).journals if is_one else journals_below(directory)
    journals = [journal for journal in found if journal.rank == 0]
    if not journals:
        raise JournalError(
            f"{str(run_dir)!r} holds no row for a tracker: expected a journal of rank 0 with its header whole. "
            "The process ended before its first row, or its rows are of other ranks."
        )
    given = {**(options or {}), **({} if tracking_uri is None else {"tracking_uri": tracking_uri})}
    with contextlib.ExitStack() as stack:
        for place in dict.fromkeys(journal.parts[0].parent for journal in journals):
            claim = Claim(place)  # some backends keep files there, which a run that begins now would write as well
            stack.callback(claim.release)
            last = [journal.parts[-1] for journal in journals if journal.parts[0].parent == place]
            busy = [path for path in last if not stack.enter_context(alone_with(path))] if claim.held else [place]
            if busy and (is_one or place == directory):
                raise _busy(busy[0])
            if busy:
                (tell or _logger.info)(f"left out: {_busy(busy[0])}")
                journals = [journal for journal in journals if journal.parts[0].parent != place]
        targets = [target for journal in journals for target in _targets(journal, to, given)]
        if not targets:
            raise UsageError(f"{str(run_dir)!r}: no tracker is known for its rows. Name one, as in --to mlflow.")
        return [_deliver(target, progress, tell or _logger.info, list(map(Path, allowed))) for target in targets]


def _busy(path: Path) -> JournalError:
    return JournalError(
        f"{str(path)!r} is still being written, or another replay reads it: expected a run that has ended. "
        "A running process delivers its rows by itself."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The rows of a journal for one backend: the options of the header, and over them those that the user has given."""

    journal: SavedJournal
    name: str
    options: Mapping[str, Any]
    given: Mapping[str, Any]


def _targets(journal: SavedJournal, to: str | None, given: Mapping[str, Any]) -> Iterator[_Target]:
    """Name the backends of a journal with the options that reach the same places again."""
    known = {entry["name"]: entry["options"] for entry in journal.backends}
    for name in known if to is None else [to]:
        address = read_offsets(offsets_path(journal.parts[0])).get(name, {}).get("address", {})
        options = {**without_hidden(known.get(name, {})), **without_hidden(address)}
        options = moved_along(options, journal.home, journal.parts[0].parent)
        yield _Target(journal=journal, name=name, options=options, given=_fitting(name, given, strict=to is not None))


def _is_known(options: Mapping[str, Any], name: str) -> bool:
    """Say whether the tracker at an address that was given knows the run; one that does not gets a run of its own."""
    try:
        registry.backends.load(name).probe(**options)
    except PermanentBackendError:
        return False
    except Exception:  # an address that does not answer is told when the rows are written
        return True
    return True


def _fitting(name: str, given: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Leave out an option that one of several backends does not have; the one that was asked for must have it."""
    if strict:
        registry.backends.load_for(name, given)
        return dict(given)
    try:
        accepted = inspect.signature(registry.backends.load(name)).parameters
    except PluginError:  # its own rows cannot be delivered, which is told when it is to be made
        return {}
    return {option: value for option, value in given.items() if option in accepted}


def _deliver(
    target: _Target, progress: Progress | None, tell: Callable[[str], object], allowed: Sequence[Path]
) -> Replayed:
    journal, name = target.journal, target.name
    result = Replayed(run_id=journal.run.run_id, backend=name)
    try:
        directory = journal.parts[0].parent
        options = settle(name, target.options, target.given, run_dir=directory, allowed=allowed)
        result = dataclasses.replace(result, destination=describe_destination(name, options, str(directory)))
        tell(result.destination)
        elsewhere = "run_id" in target.options and "tracking_uri" in target.given and not _is_known(options, name)
        if elsewhere:
            options.pop("run_id", None)
            options |= target.given
        backend = build(name, options)
        backend.confine(directory)
    except Exception as fault:
        entry = read_offsets(offsets_path(journal.parts[0])).get(name, {})
        rows, taken = _unreached(journal.rows(), entry.get("next", 0), entry.get("refused", ()))
        return dataclasses.replace(result, rows=rows, present=taken, fault=describe(fault))
    delivery = _Delivery(journal, name, backend, elsewhere=elsewhere)
    ended = delivery.run(progress)
    return dataclasses.replace(
        result,
        rows=delivery.rows,
        present=delivery.skipped + delivery.writer.present,
        delivered=delivery.writer.taken - delivery.writer.present,
        refused=len(delivery.writer.refused),
        fault=ended,
        damaged=tuple(journal.damaged),
        status=delivery.status,
    )


def _unreached(rows: Iterable[Row], following: int, refused: Collection[int]) -> tuple[int, int]:
    """Count rows that a replay did not reach, and those of them that the tracker has acknowledged."""
    total = taken = 0
    with contextlib.suppress(Exception):  # a part that cannot be read: the replay has a fault already
        for number, _ in rows:
            total += 1
            taken += number < following and number not in refused
    return total, taken


def _outcome_of(journal: SavedJournal) -> Outcome | None:
    """Say how the training of a journal ended, whose process is gone; None where its end cannot be read."""
    try:
        end = RunEnd.load(journal.parts[0].parent / RUN_END)
    except JournalError:
        return None
    if end is None or end.run_id != journal.run.run_id:
        return "killed"
    return "failed" if end.failed else "finished"


class _Delivery:
    """The rows of one journal on their way to one backend, in parts.

    What goes `elsewhere` than the run's own rows went is not noted, so that the next replay finds that place again.
    """

    def __init__(self, journal: SavedJournal, name: str, backend: Backend, *, elsewhere: bool) -> None:
        self.rows = self.skipped = 0
        self.status = ""
        self._time = 0.0
        """That of the last row."""
        self.writer = Writer(backend, journal.run)
        self._journal, self._name, self._backend = journal, name, backend
        path = offsets_path(journal.parts[0])
        entries = read_offsets(path)
        entry = {} if elsewhere else entries.get(name, {})
        self._elsewhere = elsewhere
        self._next, self._refused = entry.get("next", 0), set(entry.get("refused", ()))
        self._address: dict[str, Any] = entry.get("address", {})
        self._offsets = Offsets(path, entries=entries, interval_seconds=0.0)

    def run(self, progress: Progress | None) -> str | None:
        """Deliver everything, let the backend go, and return what went wrong, if anything."""
        fault: str | None = None
        rows, part = self._journal.rows(), list[Row]()
        try:
            total = self._journal.count()
            while part := list(itertools.islice(rows, _PART_ROWS)):
                self._settle(part)
                self.rows += len(part)
                self._time = max(self._time, *(record.time for _, record in part))
                part = []
                if progress is not None:
                    progress(self._name, self.rows, max(total, self.rows))
            outcome = None if self.writer.refused else _outcome_of(self._journal)
            if outcome is not None and self.rows:
                self.status = self._backend.end_run(outcome, time=self._time)
        except Exception as found:
            fault = describe(found)
            left = [row for row in part if row[0] not in self.writer.settled]
            total, taken = _unreached(itertools.chain(left, rows), self._next, self._refused)
            self.rows, self.skipped = self.rows + len(part) - len(left) + total, self.skipped + taken
        finally:  # also after an interrupt from the keyboard: a tracker that is closed keeps what it took
            for finish in (self._backend.flush, self._backend.close):
                try:
                    finish()
                except Exception as found:
                    fault = fault or describe(found)
        return fault

    def _settle(self, part: list[Row]) -> None:
        """Write what is missing of a part; a destination that cannot tell is believed as far as it acknowledged."""
        if self._backend.present([dataclasses.replace(part[0][1], run=self._journal.run)]) is None:
            due = [row for row in part if row[0] >= self._next or row[0] in self._refused]
            self.writer.owed.take(record for number, record in part if number < self._next)
            self._attempt(due, again=False)
            self.skipped += len(part) - len(due)
        else:
            self._attempt(part, again=True)
        if self._elsewhere:
            return
        following = max(part[-1][0] + 1, self._next)
        # A backend that had nothing to write may not know where it would have written to.
        self._address |= address_of(self._backend)
        unreached = [number for number in sorted(self._refused) if number > part[-1][0]]
        self._offsets.set(self._name, following, self.writer.refused + unreached, self._address)

    def _attempt(self, rows: list[Row], *, again: bool) -> None:
        for delay in _DELAYS_SECONDS:
            try:
                self.writer.write(rows, again=again)
                return
            except Exception:
                time.sleep(delay)
                again = True
        self.writer.write(rows, again=again)
