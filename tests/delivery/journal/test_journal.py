"""The journal keeps every row exactly, whatever happens to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrack.config import GradientConfig
from gradtrack.delivery.journal.reading import find_journals
from gradtrack.delivery.journal.writing import Journal, Limits, is_being_written
from gradtrack.delivery.run import Sink
from gradtrack.errors import JournalError
from gradtrack.records import Record, RunInfo
from tests.delivery.doubles import RUN, in_child, row
from tests.delivery.strategies import records


def filled(directory: Path, rows: list[Record], limits: Limits | None = None) -> Journal:
    """Write rows to a new journal and close it."""
    journal = Journal(directory, RUN, backends=[{"name": "mlflow", "options": {}}], limits=limits)
    for number, record in enumerate(rows):
        assert journal.append(number, record)
    journal.close(10.0)
    return journal


def read(directory: Path) -> list[Record]:
    """Read the rows of the only journal in a directory."""
    (journal,) = find_journals(directory)
    rows = list(journal.rows())
    assert [number for number, _ in rows] == sorted(number for number, _ in rows)
    return [record for _, record in rows]


@settings(max_examples=60)
@given(st.lists(records, min_size=1, max_size=5))
def test_case_16_records_round_trip_exactly(rows: list[Record]) -> None:
    """Every part of every record comes back, NaN and both infinities included."""
    with tempfile.TemporaryDirectory() as name:
        filled(Path(name), rows)
        assert repr(read(Path(name))) == repr(rows)


def test_lines_are_ascii(tmp_path: Path) -> None:
    """As the format says, whatever a name holds."""
    filled(tmp_path, [row(1, metrics={"größe\u2028\x85": 0.1})])
    assert (tmp_path / "journal-000.jsonl").read_bytes().isascii()


@pytest.mark.parametrize("name", ["größe/层", "\u2028 \x00", "bad \udcff name", "🧨"])
def test_names_of_any_text_round_trip(tmp_path: Path, name: str) -> None:
    """Also those that are not Unicode, as the names of files can be, and those that end a line elsewhere."""
    filled(tmp_path, [row(1, metrics={name: 0.1}, source=name)])
    assert read(tmp_path) == [row(1, metrics={name: 0.1}, source=name)]


def test_files_move_with_their_run(tmp_path: Path) -> None:
    """A file in the run's directory is found where the directory lies now; one outside of it is not."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    inside, outside = old / "picture.png", tmp_path / "secret.txt"
    filled(old, [row(1, files=(str(inside), str(outside)))])
    old.rename(new)
    assert read(new)[0].files == (str(new / "picture.png"),)


def test_header_names_run_and_backends(tmp_path: Path) -> None:
    """The first line says whose rows follow, in which format, and where they were to go."""
    filled(tmp_path, [row(1)])
    header = json.loads((tmp_path / "journal-000.jsonl").read_text().splitlines()[0])
    assert (header["gradtrack_journal"], header["part"], header["first"], header["rank"]) == (1, 0, 0, 0)
    assert header["pid"] == os.getpid()
    (journal,) = find_journals(tmp_path)
    assert (journal.run.run_id, journal.run.config) == ("run-1", {"max_grad_norm": 1.0})
    assert journal.run.run_dir == str(tmp_path)
    assert journal.backends == [{"name": "mlflow", "options": {}}]


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    """A journal has mode 0600."""
    filled(tmp_path, [row(1)])
    assert stat.S_IMODE((tmp_path / "journal-000.jsonl").stat().st_mode) == 0o600


def test_row_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    """A row needs neither a flush nor a close to be seen by another process."""
    journal = Journal(tmp_path, RUN)
    journal.append(0, row(7))
    assert [record.step for record in read(tmp_path)] == [7]
    journal.close()


def test_urgent_row_reaches_the_disk_without_the_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that tells of a non-finite gradient is made durable at once, by a thread that is not the training's."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    journal = Journal(tmp_path, RUN, limits=Limits(sync_seconds=3600.0))
    journal.append(0, row(1))
    assert journal.path is not None
    identity = journal.path.stat().st_ino
    assert identity not in synced
    journal.append(1, row(2), urgent=True)
    journal.sync(30.0)
    assert identity in synced
    journal.close(10.0)


def test_parts_follow_each_other(tmp_path: Path) -> None:
    """A journal over its part's size goes on in the next one, and reads as one."""
    rows = [row(step) for step in range(100)]
    journal = filled(tmp_path, rows, Limits(part_bytes=1000, total_bytes=10**9))
    assert len(journal.parts) > 5
    assert all(part.stat().st_size <= 1000 for part in journal.parts)
    assert read(tmp_path) == rows


def test_journal_stays_within_its_bound(tmp_path: Path) -> None:
    """Of a journal at its bound the oldest parts go, and the newest rows stay in order."""
    journal = filled(tmp_path, [row(step) for step in range(300)], Limits(part_bytes=1000, total_bytes=3000))
    assert journal.removed > 0
    assert sum(path.stat().st_size for path in tmp_path.glob("journal-*.jsonl")) <= 3000
    steps = [record.step for record in read(tmp_path)]
    assert steps == list(range(steps[0], 300))


def test_rows_can_be_read_again_from_any_number(tmp_path: Path) -> None:
    """While it is written, a journal gives out its rows from a number on, over all parts."""
    journal = Journal(tmp_path, RUN, limits=Limits(part_bytes=20_000))
    for number in range(1000):
        journal.append(number, row(number))
    for start in (0, 1, 127, 128, 129, 500, 999, 1000):
        assert [number for number, _ in journal.reread(start)] == list(range(start, 1000))
    journal.close()


def test_second_run_keeps_the_first(tmp_path: Path) -> None:
    """A run in a directory that has a journal already begins one of its own."""
    filled(tmp_path, [row(1)])
    second = Journal(tmp_path, RunInfo(run_id="run-2"))
    second.append(0, row(2))
    second.close()
    found = {journal.run.run_id: [record.step for _, record in journal.rows()] for journal in find_journals(tmp_path)}
    assert found == {"run-1": [1], "run-2": [2]}


def test_ranks_have_journals_of_their_own(tmp_path: Path) -> None:
    """The rows of another rank lie next to those of rank 0 and are told apart."""
    filled(tmp_path, [row(1)])
    other = Journal(tmp_path, RUN, rank=3)
    other.append(0, row(2))
    other.close()
    assert other.path == tmp_path / "journal-rank3-000.jsonl"
    assert sorted((journal.rank, len(list(journal.rows()))) for journal in find_journals(tmp_path)) == [(0, 1), (3, 1)]


def test_live_journal_is_known_as_such(tmp_path: Path) -> None:
    """As long as a journal is open, others can see that it is."""
    journal = Journal(tmp_path, RUN)
    journal.append(0, row(1))
    assert journal.path is not None
    assert is_being_written(journal.path)
    journal.close(10.0)
    assert not is_being_written(journal.path)


TAILS = [b'{"n":9,"step":9,"ti', b"\x00\xff garbage \n", b"[]\n", b"{}\n", b"[" * 10_000 + b"\n"]


@pytest.mark.parametrize("tail", TAILS)
def test_case_25_torn_or_garbage_tail_is_skipped_with_a_reason(tmp_path: Path, tail: bytes) -> None:
    """What a crash or a bad disk left at the end costs no row before it."""
    filled(tmp_path, [row(1), row(2)])
    with (tmp_path / "journal-000.jsonl").open("ab") as stream:
        stream.write(tail)
    (journal,) = find_journals(tmp_path)
    assert [record.step for _, record in journal.rows()] == [1, 2]
    assert len(journal.damaged) == 1
    assert "journal-000.jsonl" in journal.damaged[0]


@settings(max_examples=60)
@given(st.data())
def test_case_25_any_cut_keeps_every_whole_row(data: st.DataObject) -> None:
    """However much of the end is missing, all rows before the cut are read; within the header there is no journal."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "journal-000.jsonl"
        filled(path.parent, [row(step) for step in range(10)])
        whole = path.read_bytes()
        header = whole.index(b"\n") + 1
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        rows = [list(journal.rows()) for journal in find_journals(path.parent)]
        assert [len(found) for found in rows] == ([whole[header:cut].count(b"\n")] if cut >= header else [])


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_case_25_garbage_is_refused_without_being_run(garbage: bytes) -> None:
    """A file of arbitrary bytes is an error of this package, or no journal, and nothing else."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "journal-000.jsonl").write_bytes(garbage)
        with contextlib.suppress(JournalError):
            assert [list(journal.rows()) for journal in find_journals(Path(name))] in ([], [[]])


def test_case_25_foreign_version_is_refused(tmp_path: Path) -> None:
    """A journal of another format is not guessed at."""
    (tmp_path / "journal-000.jsonl").write_text('{"gradtrack_journal": 2}\n')
    with pytest.raises(JournalError, match="has journal format 2: expected 1"):
        find_journals(tmp_path)


@pytest.mark.parametrize(("field", "number"), [("rank", "1e999"), ("part", "1e999"), ("created", "1" + "0" * 400)])
def test_case_25_numbers_that_are_none_are_refused(tmp_path: Path, field: str, number: str) -> None:
    """A header whose numbers no computer has is one line as well."""
    filled(tmp_path, [row(1)])
    part = tmp_path / "journal-000.jsonl"
    part.write_text(re.sub(rf'("{field}":)[0-9.]+', rf"\g<1>{number}", part.read_text(), count=1))
    with pytest.raises(JournalError, match="does not begin like a journal"):
        find_journals(tmp_path)


def test_case_25_header_cut_short_is_no_journal(tmp_path: Path) -> None:
    """A process that died while it began a part left nothing to read, and does no harm to the others."""
    filled(tmp_path, [row(1)])
    (tmp_path / "journal-001.jsonl").write_text('{"gradtrack_jour')
    assert [record.step for record in read(tmp_path)] == [1]


@pytest.mark.parametrize("longer", [False, True])
def test_copy_of_a_part_is_no_second_journal(tmp_path: Path, longer: bool) -> None:
    """A part that was copied beside itself is read once, and of two the one that holds more."""
    filled(tmp_path, [row(1), row(2)])
    part = tmp_path / "journal-000.jsonl"
    shutil.copy(part, tmp_path / "journal-000-copy.jsonl")
    shutil.copy(part, tmp_path / "journal-copy.jsonl")
    shutil.copy(part, tmp_path / "journal-000-\N{SUPERSCRIPT TWO}.jsonl")
    if longer:
        part.write_bytes(b"".join(part.read_bytes().splitlines(keepends=True)[:2]))
    assert [record.step for record in read(tmp_path)] == [1, 2]


def test_journal_that_cannot_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or a directory of another user is one line with the reason."""
    (tmp_path / "journal-000.jsonl").mkdir()
    with pytest.raises(JournalError, match=r"cannot be read \(Is a directory\): expected a run of yours"):
        find_journals(tmp_path)

    def forbidden(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("gradtrack.delivery.journal.reading.os.listdir", forbidden)
    with pytest.raises(JournalError, match=r"cannot be read \(Permission denied\)"):
        find_journals(tmp_path)


def test_directory_without_a_journal_says_so(tmp_path: Path) -> None:
    """Looking for rows where no run was is an error that names the place."""
    with pytest.raises(JournalError, match="holds no journal"):
        find_journals(tmp_path)


def test_unwritable_directory_is_counted_not_raised(tmp_path: Path) -> None:
    """A row that cannot be written costs no exception, and the next one tries again."""
    blocked = tmp_path / "run"
    blocked.write_text("a file where the directory should be")
    journal = Journal(blocked, RUN)
    assert not journal.append(0, row(1))
    assert (journal.failed, journal.rows) == (1, 0)
    assert isinstance(journal.fault, OSError)
    blocked.unlink()
    assert journal.append(1, row(2))
    journal.close(10.0)
    assert [record.step for record in read(blocked)] == [2]


FULL_DISK = """
import resource, sys
from pathlib import Path
from gradtrack.delivery.journal.writing import Journal
from tests.delivery.doubles import RUN, row
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
journal = Journal(Path(sys.argv[1]), RUN)
kept = [step for step in range(200) if journal.append(step, row(step))]
first_failure = len(kept)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
kept += [step for step in range(200, 210) if journal.append(step, row(step))]
journal.close(10.0)
print(kept, journal.failed)
"""


def test_case_14_full_disk_keeps_whole_rows_only(tmp_path: Path) -> None:
    """Rows that do not fit are counted and leave no half lines; when there is room again, rows go on."""
    done = in_child(FULL_DISK, str(tmp_path))
    assert done.returncode == 0, done.stderr
    kept, failed = done.stdout.rsplit(" ", 1)
    steps = [record.step for record in read(tmp_path)]
    assert steps == json.loads(kept)
    assert int(failed) == 210 - len(steps) > 0
    assert steps[-10:] == list(range(200, 210))
    assert find_journals(tmp_path)[0].damaged == []


def test_removed_journal_is_told_and_begun_again(tmp_path: Path) -> None:
    """Rows of a file that was removed count as not kept, and later rows go to a new one."""
    journal = Journal(tmp_path / "run", RUN, limits=Limits(sync_seconds=3600.0))
    for number in range(3):
        journal.append(number, row(number))
    shutil.rmtree(tmp_path / "run")
    journal.sync(30.0)
    journal.append(3, row(3))
    assert (journal.rows, journal.failed) == (1, 3)
    assert "the journal was removed" in str(journal.fault)
    assert [record.step for record in read(tmp_path / "run")] == [3]
    shutil.rmtree(tmp_path / "run")
    journal.close(10.0)
    assert (journal.rows, journal.failed) == (0, 4)


def test_sync_waits_until_the_disk_has_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another thread is making them durable at that moment."""
    entered, ended, real = threading.Event(), threading.Event(), os.fsync

    def slow(handle: int) -> None:
        entered.set()
        ended.wait(0.5)
        real(handle)
        ended.set()

    monkeypatch.setattr("gradtrack.delivery.journal.writing.os.fsync", slow)
    journal = Journal(tmp_path, RUN, limits=Limits(sync_seconds=3600.0))
    journal.append(0, row(0), urgent=True)
    assert entered.wait(30)
    journal.sync(30.0)
    assert ended.is_set()
    journal.close(10.0)


@pytest.mark.parametrize("gone", [[-1], [0], [1, -1], [0, 1]])
def test_rows_of_removed_parts_are_counted_once(tmp_path: Path, gone: list[int]) -> None:
    """Whichever parts are removed, and whatever comes after, each row is in the journal or counted as failed."""
    journal = Journal(tmp_path, RUN, limits=Limits(part_bytes=1000, total_bytes=10**9, sync_seconds=3600.0))
    numbers = iter(range(100))
    for _ in range(2):
        for number in itertools.islice(numbers, 30):
            journal.append(number, row(number))
        for part in [journal.parts[index] for index in (*gone, -1)]:
            part.unlink(missing_ok=True)
        journal.append(next(numbers), row(0))
        journal.sync(30.0)
    journal.append(next(numbers), row(0))
    assert journal.rows == len(read(tmp_path))
    assert journal.rows + journal.failed == next(numbers)
    journal.close()


def test_rows_of_a_part_that_is_gone_are_left_out(tmp_path: Path) -> None:
    """A reader that lags behind the bound of the journal gets the rows that are still there."""
    journal = Journal(tmp_path, RUN, limits=Limits(part_bytes=1000))
    for number in range(30):
        journal.append(number, row(number))
    reading = journal.reread(0)
    assert next(reading)[0] == 0
    journal.parts[1].unlink()
    found = [number for number, _ in reading]
    assert found == sorted(found)
    assert 0 < len(found) < 29
    assert found[-1] == 29
    journal.close()


def test_row_that_cannot_be_written_down_is_counted(tmp_path: Path) -> None:
    """What a third-party analyzer put into a row costs that row, not the training."""

    class Odd:
        def __str__(self) -> str:
            raise ValueError("no text")

    journal = Journal(tmp_path, RUN)
    assert not journal.append(0, row(1, issues=({"message": Odd()},)))
    assert journal.append(1, row(2))
    assert (journal.rows, journal.failed, str(journal.fault)) == (1, 1, "no text")
    journal.close()


def test_two_journals_of_one_run_are_read_together(tmp_path: Path) -> None:
    """Rows of both are there, under numbers that no other row has, whichever file is the longer one."""
    first = filled(tmp_path, [row(step) for step in range(3)])
    second = Journal(tmp_path, dataclasses.replace(RUN, created=RUN.created + 1e-6))
    for number in range(5):
        assert second.append(number, row(10 + number))
    second.close(10.0)
    (found,) = find_journals(tmp_path)
    assert [record.step for _, record in found.rows()] == [0, 1, 2, 10, 11, 12, 13, 14]
    assert [number for number, _ in found.rows()] == list(range(8))
    assert found.parts == [*first.parts, *second.parts]


def test_two_threads_with_first_rows_share_a_journal(tmp_path: Path) -> None:
    """Every row is in one file, under a number of its own."""
    num_threads, num_rows = 6, 20
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for attempt in range(10):
            sink = Sink(GradientConfig(run_dir=tmp_path / str(attempt)))
            together = threading.Barrier(num_threads)

            def write(thread: int, sink: Sink = sink, together: threading.Barrier = together) -> None:
                together.wait()
                for step in range(num_rows):
                    sink.write(row(thread * num_rows + step))

            with ThreadPoolExecutor(num_threads) as threads:
                list(threads.map(write, range(num_threads)))
            sink.close(failed=False)
            (journal,) = find_journals(tmp_path / str(attempt))
            assert sorted(record.step for _, record in journal.rows()) == list(range(num_threads * num_rows))
            assert len(journal.parts) == 1
    finally:
        sys.setswitchinterval(before)
