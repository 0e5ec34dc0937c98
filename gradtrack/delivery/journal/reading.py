"""Journals and runs read back, whatever the end of the process left of them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gradtrack.delivery.journal.codec import decode_row, decode_run
from gradtrack.delivery.journal.tail import read_tail
from gradtrack.errors import JournalError, UsageError
from gradtrack.records import Record, RunInfo
from gradtrack.support.checksums import intact_lines, is_intact
from gradtrack.support.names import file_part
from gradtrack.support.regular_files import MEBIBYTE, check_json, is_regular, open_regular

FORMAT: Final = 1
PART_BYTES: Final = 256 * MEBIBYTE
"""More than a part ever has."""
_LONGEST_LINE: Final = 64 * MEBIBYTE
_LONGEST_HEADER: Final = 16 * MEBIBYTE
_ROW_START: Final = b'{"n":'
_CHECKSUM: Final = b',"checksum":"crc32'


@dataclass(slots=True, kw_only=True)
class SavedJournal:
    """The journal of one run and rank: its identity, its parts in order, and what could not be read.

    `home` is the directory in which it was written, which may have been moved since. `unreadable` names the parts in
    the directory, of this run or another, that cannot be read at all.
    """

    run: RunInfo
    home: str
    rank: int
    backends: list[dict[str, Any]]
    parts: list[Path]
    unreadable: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def count(self) -> int:
        """Count the lines that may be rows."""
        total = 0
        for part in self.parts:
            with open_regular(part, most_bytes=PART_BYTES) as stream:
                total += sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(MEBIBYTE), b"")) - 1
        return total

    def size(self) -> int:
        """Return the number of bytes in all parts."""
        return sum(part.stat().st_size for part in self.parts)

    def rows(self, read: Callable[[int], object] | None = None) -> Iterator[tuple[int, Record]]:
        """Yield every whole row; `damaged` gets the reasons for the others, and `read` the size of each line."""
        self.damaged[:] = self.unreadable
        last, known = -1, set[int]()
        for part in self.parts:
            shift: int | None = None
            for number, record in _in_order(read_rows(part, note=self.damaged.append, read=read)):
                if shift is None:  # two journals of one run count from zero each
                    shift = max(last + 1 - number, 0)
                last = max(last, number + shift)
                known.add(number + shift)
                yield number + shift, record
        for tail in sorted(self.parts[0].parent.glob("journal-*.tail")) if self.parts else ():
            yield from read_tail(tail, self.run.run_id, self.rank, known, self.damaged.append)


def find_journals(run_dir: Path) -> list[SavedJournal]:
    """Return the journals in a run's directory, the oldest first; of a part that was copied, the longer file.

    Copies have the same header. Parts of one number with different headers come from two journals of one run, which two
    threads could open before that was locked; the rows of both belong to it.
    """
    found: dict[tuple[str, int], SavedJournal] = {}
    known: dict[tuple[str, int, bytes], Path] = {}
    try:
        names = os.listdir(run_dir)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as fault:
        raise _unreadable(run_dir, fault) from None
    parts = [run_dir / name for name in names if name.startswith("journal-") and name.endswith(".jsonl")]
    if not parts:
        raise JournalError(f"{str(run_dir)!r} holds no journal: expected a run's directory. {_remedy(run_dir)}")
    unreadable: list[str] = []
    refused: JournalError | None = None
    for path in sorted(parts, key=_order):
        try:
            line = _first_line(path)
            if not line.endswith(b"\n"):  # the process ended before it was whole
                continue
            header = _read_header(path, line)
        except JournalError as fault:
            unreadable.append(f"{path.name}: {fault}")
            refused = refused or fault
            continue
        run, rank = decode_run(header["run"], run_dir), int(header["rank"])
        backends = [dict(backend) for backend in header["backends"]]
        home = str(header["run"].get("run_dir") or "")
        new = SavedJournal(run=run, home=home, rank=rank, backends=backends, parts=[], unreadable=unreadable)
        parts_of_run = found.setdefault((run.run_id, rank), new).parts
        first = known.setdefault((run.run_id, rank, line), path)
        if first is path:
            parts_of_run.append(path)
        elif path.stat().st_size > first.stat().st_size:
            parts_of_run[parts_of_run.index(first)] = known[run.run_id, rank, line] = path
    if refused is not None and not found:
        raise refused
    return list(found.values())


@dataclass(slots=True, kw_only=True)
class SavedRun:
    """A run of a directory: its journals, each but the first of a training that was resumed from the one before.

    `name` is `RUN_DIR@2` for the second run of a directory that has several.
    """

    name: str
    journals: list[SavedJournal]

    @property
    def run_id(self) -> str:
        """Return the identity of the run, which is that of its first part."""
        return self.journals[0].run.run_id

    @property
    def directory(self) -> Path:
        """Return where the last part lies."""
        return self.journals[-1].parts[0].parent

    def size(self) -> int:
        """Return the number of bytes in all journals."""
        return sum(journal.size() for journal in self.journals)

    def rows(self, read: Callable[[int], object] | None = None) -> Iterator[Record]:
        """Yield the rows of all parts, without those that a resumed training has made again or left behind."""
        for number, journal in enumerate(self.journals, 1):
            later = [following.run.resumed_at for following in self.journals[number:]]
            for _, row in journal.rows(read):
                if all(row.step <= ends.get(row.source, row.step) for ends in later):
                    yield row


def find_runs(run_dir: Path) -> list[SavedRun]:
    """Return the runs of a directory, the oldest first; all but the first lie in directories of their own inside.

    Where several trainings were resumed from one, the newest of them continues its run.
    """
    return _runs_of(_parts_in(run_dir), run_dir)


def open_run(run: str | Path) -> SavedRun:
    """Return a run: the newest one of a directory, its second one as `RUN_DIR@2`, or any as `RUN_DIR@RUN_ID`."""
    head, at, wanted = str(run).rpartition("@")
    if not at or os.path.lexists(run):
        head, wanted = str(run), ""
    parts = _parts_in(Path(head))
    runs = _runs_of(parts, Path(head))
    if not runs:
        raise JournalError(f"{head!r} has an empty journal: expected one that a run has begun. Try it later.")
    if not wanted:
        return max(runs, key=lambda found: found.journals[-1].run.created)
    if wanted.isdecimal() and 0 < int(wanted) <= len(runs):
        return runs[int(wanted) - 1]
    if wanted in parts:
        left_behind = SavedRun(name=str(run), journals=_chain(parts[wanted], parts))
        return next((found for found in runs if parts[wanted] in found.journals), left_behind)
    raise UsageError(
        f"{str(run)!r}: expected a run of {head!r}, @1 to @{len(runs)} or @ and its id. Choose one of them."
    )


def journals_below(run_dir: Path) -> list[SavedJournal]:
    """Return the journals in a run's directory and in those that later runs have inside of it."""
    journals, faults = list[SavedJournal](), list[JournalError]()
    inside = {path.parent for path in run_dir.glob("*/journal-*.jsonl") if not path.parent.is_symlink()}
    for place in [run_dir, *sorted(inside)]:
        try:
            found = find_journals(place)
        except JournalError as fault:
            faults.append(fault)
            continue
        if place == run_dir or any(file_part(journal.run.run_id) == place.name for journal in found):
            journals += found
    if faults and not journals:
        raise faults[0]
    return journals


def _parts_in(run_dir: Path) -> dict[str, SavedJournal]:
    """Return the journals of the runs of a directory by their identity, the oldest first, those of one rank only."""
    journals = sorted(journals_below(run_dir), key=lambda journal: journal.run.created)
    least = min((journal.rank for journal in journals), default=0)
    return {journal.run.run_id: journal for journal in journals if journal.rank == least}


def _runs_of(parts: Mapping[str, SavedJournal], run_dir: Path) -> list[SavedRun]:
    chains = {chain[0].run.run_id: chain for chain in (_chain(journal, parts) for journal in parts.values())}
    runs = sorted(chains.values(), key=lambda chain: chain[0].run.created)
    names = [f"{run_dir}@{number}" for number in range(1, len(runs) + 1)] if len(runs) > 1 else [str(run_dir)]
    return [SavedRun(name=name, journals=chain) for name, chain in zip(names, runs, strict=False)]


def _chain(journal: SavedJournal, parts: Mapping[str, SavedJournal]) -> list[SavedJournal]:
    """Return the journals of the trainings from which a training was resumed, the first one first, and its own."""
    chain = [journal]
    while (before := parts.get(chain[0].run.resumed_from)) is not None and before not in chain:
        chain.insert(0, before)
    return chain


def _unreadable(path: Path, fault: OSError) -> JournalError:
    remedy = "a run of yours. Ask its owner for the right to read it."
    if fault.errno in (errno.EINVAL, errno.ELOOP, errno.EFBIG):
        remedy = "a file that gradtrack has written. Move it out of the run's directory."
    return JournalError(f"{str(path)!r} cannot be read ({fault.strerror or fault}): expected {remedy}")


def _remedy(run_dir: Path) -> str:
    """Name the newest of the runs in a directory that is none itself."""
    runs = filter(is_regular, run_dir.glob("*/journal-*.jsonl"))
    within = max(runs, key=lambda path: path.stat().st_mtime, default=None)
    return "Check the path." if within is None else f"It holds others; the newest is {str(within.parent)!r}."


def _read_header(path: Path, line: bytes) -> Mapping[str, Any]:
    """Return the content of a part's first line, having touched what is used later, so that a bad one fails here."""
    if is_intact(line) is not True and _CHECKSUM in line:  # the end of its line may be all that was changed
        line = next(iter(intact_lines(line, b'{"gradtrack_journal":')), line)
    try:
        if is_intact(line) is False:
            raise ValueError("its checksum does not match")
        header: Mapping[str, Any] = json.loads(check_json(line))
        version = header["gradtrack_journal"]
        if version == FORMAT:
            int(header["rank"]), int(header["part"])
            decode_run(header["run"], Path())
            for backend in header["backends"]:
                if not isinstance(backend["name"], str) or not isinstance(backend["options"], dict):
                    raise TypeError("a backend in it has no name or no options")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as fault:
        raise JournalError(
            f"{str(path)!r} does not begin like a journal ({type(fault).__name__}: {fault!s:.70}): "
            "expected its header. Move the file out of the run's directory."
        ) from None
    if version != FORMAT:
        raise JournalError(
            f"{str(path)!r} has journal format {version!r:.20}: expected {FORMAT}. "
            "Read it with the gradtrack that wrote it."
        )
    return header


def _first_line(path: Path) -> bytes:
    try:
        with open_regular(path, most_bytes=PART_BYTES) as stream:
            return stream.readline(_LONGEST_HEADER)
    except OSError as fault:
        raise _unreadable(path, fault) from None


def _in_order(rows: Iterator[tuple[int, Record]]) -> Iterator[tuple[int, Record]]:
    """Number the rows of a part upwards, as they were written: one whose number was changed gets that of its place.

    The number of a row decides what a tracker has got, so a wrong one would have others taken for delivered.
    """
    before = -1
    end: tuple[float, Any] = math.inf, None
    for (number, record), (following, _) in itertools.pairwise(itertools.chain(rows, [end])):
        fits = before < number and (number < following or following <= before)
        before = int(number) if fits else before + 1
        yield before, record


def read_rows(
    path: Path,
    *,
    offset: int = 0,
    trusted: bool = False,
    note: Callable[[str], object] | None = None,
    read: Callable[[int], object] | None = None,
) -> Iterator[tuple[int, Record]]:
    """Yield the rows of one part; a line that is torn, changed or garbage is skipped with a note.

    Rows that are whole in such a line, since the end of a line before them was changed, are not skipped.
    """
    with open_regular(path, most_bytes=PART_BYTES) as stream:
        first = stream.readline(_LONGEST_LINE)
        signed = _CHECKSUM in first
        lines: Iterator[bytes] = iter(lambda: stream.readline(_LONGEST_LINE), b"")
        if offset:
            stream.seek(offset)
        elif signed and not is_intact(first):
            lines = itertools.chain(intact_lines(first, _ROW_START), lines)
        for line in lines:
            if read is not None:
                read(len(line))
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("the line has no end")
                intact = is_intact(line)
                if intact is False or (signed and not intact):
                    raise ValueError(f"its checksum {'does not match' if intact is False else 'is missing'}")
                yield decode_row(line, path.parent, trusted=trusted)
            except ValueError as fault:
                if note is not None:
                    note(f"{path.name}, before byte {stream.tell()}: {fault!s:.120}")
                for whole in intact_lines(line, _ROW_START) if signed else ():
                    with contextlib.suppress(ValueError):
                        yield decode_row(whole, path.parent, trusted=trusted)


def _order(path: Path) -> tuple[str, bool, int]:
    """Put the parts of a series in order, and copies of them behind."""
    series, _, part = path.stem.rpartition("-")
    return series, not part.isdecimal(), int(part) if part.isdecimal() else -1
