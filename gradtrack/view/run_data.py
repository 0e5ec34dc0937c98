"""The data of one run, read from its directory for whoever shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gradtrack.errors import JournalError
from gradtrack.progress import Bar
from gradtrack.record.journal import is_being_written
from gradtrack.record.reading import SavedJournal, find_journals
from gradtrack.record.run_end import RUN_END, RunEnd
from gradtrack.records import Record, RunInfo
from gradtrack.reports import IssueSeverity
from gradtrack.view.issue_history import IssueHistory, IssueLog
from gradtrack.view.track import Track


@dataclass(slots=True, kw_only=True)
class RunData:
    """One run: its identity, its rows as columns, its issues, and what was known when it ended."""

    run: RunInfo
    directory: Path
    tracks: dict[str, Track]
    issues: list[IssueHistory]
    end: RunEnd | None = None
    is_running: bool = False
    damaged: list[str] = field(default_factory=list)

    @property
    def total_steps(self) -> int:
        """Return how many steps were taken, as far as is known."""
        if self.end is not None:
            return self.end.summary.total_steps
        return max((int(track.steps.max()) for track in self.tracks.values() if len(track.steps)), default=0)

    @property
    def state(self) -> str:
        """Tell in a word or two whether the run goes on or how it ended."""
        if self.end is not None:
            return "failed" if self.end.failed else "ended"
        return "running" if self.is_running else "stopped without an end"

    @property
    def warning(self) -> str:
        """Say what became of a run that did not end as it should, and what to do now."""
        if self.end is not None:
            return "The training raised an error." if self.end.failed else ""
        if self.is_running:
            return ""
        return (
            "The process ended without closing the run: what it recorded is here. "
            "gradtrack replay delivers what its trackers are missing."
        )

    @property
    def open_issues(self) -> list[IssueHistory]:
        """Return the issues that were open at the end."""
        return [issue for issue in self.issues if issue.is_open]

    @property
    def left_out(self) -> str:
        """Say how many rows cannot be read; nothing where all can."""
        count = len(self.damaged)
        return f"{count} damaged row{'' if count == 1 else 's'} left out" if count else ""

    @property
    def healthy(self) -> bool:
        """Whether no issue of MEDIUM or above was open at the end."""
        return all(issue.severity < IssueSeverity.MEDIUM for issue in self.open_issues)

    @classmethod
    def of(cls, run: RunInfo, directory: Path, records: Iterable[Record]) -> RunData:
        """Gather the rows of a run, with what its directory says about its end."""
        tracks: dict[str, Track] = {}
        issues = IssueLog()
        for record in records:
            tracks.setdefault(record.source, Track(record.source)).add(record)
            issues.add(record)
        end = RunEnd.load(directory / RUN_END)
        return cls(
            run=run,
            directory=directory,
            tracks=tracks,
            issues=issues.ordered(),
            end=end if end is not None and end.run_id == run.run_id else None,
        )


def load_run(directory: Path, *, watched: bool = False) -> RunData:
    """Read the newest run in a directory; `watched` shows how far it is, where that takes long."""
    journal = _newest(directory)
    with Bar(f"Reading {directory.name}", total=journal.size(), unit="bytes") as bar:
        rows = journal.rows(bar.advance if watched else None)
        run = RunData.of(journal.run, directory, (record for _, record in rows))
    run.damaged = list(journal.damaged)
    run.is_running = is_being_written(journal.parts[-1])
    return run


def is_running(directory: Path) -> bool:
    """Tell whether the newest run in a directory goes on, without reading it."""
    return is_being_written(_newest(directory).parts[-1])


def _newest(directory: Path) -> SavedJournal:
    journals = find_journals(directory)
    if not journals:
        raise JournalError(f"{str(directory)!r} has an empty journal: expected one that a run has begun. Try it later.")
    return max(journals, key=lambda found: (found.run.created, -found.rank))
