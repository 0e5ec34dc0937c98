"""A damaged line of a journal is named, never delivered as a value, and hides no other row."""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.delivery.journal.codec import decode_row, encode_row
from gradtrack.delivery.journal.reading import find_journals
from gradtrack.delivery.journal.writing import Journal
from gradtrack.errors import JournalError
from gradtrack.records import Record, RunInfo
from gradtrack.support import checksums
from gradtrack.support.checksums import CHECKSUM, crc32c, intact_lines, is_intact, with_checksum
from tests.delivery.doubles import RUN, row

ROWS = 8


def written(directory: Path) -> Path:
    """Write a journal of some rows, and return its only part."""
    journal = Journal(directory, RUN)
    for step in range(ROWS):
        journal.append(step, row(step, metrics={"train/grad_norm": step + 0.123456789}))
    journal.close(10.0)
    return directory / "journal-000.jsonl"


def unsigned(path: Path) -> list[bytes]:
    """Write the part as versions before 0.2 did, without checksums, and return its lines."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        line.pop(CHECKSUM)
        line.pop("checksum", None)
    return [f"{json.dumps(line, separators=(',', ':'))}\n".encode() for line in lines]


def read(directory: Path) -> tuple[list[tuple[int, Record]], list[str]]:
    """Return the rows of the only journal, and what was damaged; nothing where its header is refused."""
    try:
        (journal,) = find_journals(directory)
    except JournalError as fault:
        return [], [str(fault)]
    return list(journal.rows()), journal.damaged


@given(st.data())
def test_any_changed_byte_is_found(data: st.DataObject) -> None:
    """Wherever it is: at most the row that it is in is missing, and named; what arrives is what was written."""
    with tempfile.TemporaryDirectory() as name:
        path = written(Path(name))
        content = bytearray(path.read_bytes())
        expected, none = read(Path(name))
        assert (len(expected), none) == (ROWS, [])
        start = len(path.read_bytes().splitlines(keepends=True)[0]) - 1
        place = data.draw(st.integers(start, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[place]))
        path.write_bytes(content)
        rows, damaged = read(Path(name))
    assert len(rows) >= ROWS - 1
    assert all(found in expected for found in rows)
    assert damaged or len(rows) == ROWS
    if damaged:
        assert "journal-000.jsonl" in damaged[0]


@given(st.data())
def test_a_changed_header_is_never_believed(data: st.DataObject) -> None:
    """The identity of a run decides which run of a tracker gets its rows; the checksum itself is not asked."""
    with tempfile.TemporaryDirectory() as name:
        path = written(Path(name))
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, content.index(b',"crc32') - 1))
        content[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[place]))
        path.write_bytes(content)
        rows, damaged = read(Path(name))
    assert (rows, len(damaged)) == ([], 1)


@given(st.integers(0, ROWS - 1), st.integers(0, 2**70))
def test_a_changed_number_hides_no_row(place: int, number: int) -> None:
    """Also in a journal without checksums: its rows keep numbers that go up, and only the changed row may be named."""
    with tempfile.TemporaryDirectory() as name:
        path = written(Path(name))
        lines = unsigned(path)
        lines[place + 1] = lines[place + 1].replace(b'{"n":%d,' % place, b'{"n":%d,' % number)
        path.write_bytes(b"".join(lines))
        rows, damaged = read(Path(name))
    assert len(rows) + len(damaged) == ROWS
    assert {record.step for _, record in rows} >= set(range(ROWS)) - {place}
    numbers = [found for found, _ in rows]
    assert numbers == sorted(set(numbers))
    if place < ROWS - 1 and not damaged:
        assert numbers == list(range(ROWS))


def test_damaged_header_hides_no_other_run(tmp_path: Path) -> None:
    """The other runs of the directory, and the other parts of its own, are read, and the part is named."""
    path = written(tmp_path)
    for number in (1, 2):
        journal = Journal(tmp_path, RunInfo(run_id=f"run-{number + 1}", created=1.0))
        journal.append(0, row(number))
        journal.close(10.0)
    path.write_bytes(path.read_bytes().replace(b'"rank":0', b'"rank":1'))
    journals = find_journals(tmp_path)
    assert [found.run.run_id for found in journals] == ["run-2", "run-3"]
    for found in journals:
        assert len(list(found.rows())) == 1
        assert [path.name in damaged for damaged in found.damaged] == [True]


def test_journal_without_checksums_is_read(tmp_path: Path) -> None:
    """As versions before 0.2 wrote it."""
    path = written(tmp_path)
    expected, _ = read(tmp_path)
    path.write_bytes(b"".join(unsigned(path)))
    assert read(tmp_path) == (expected, [])


def test_row_that_lost_its_checksum_is_damaged(tmp_path: Path) -> None:
    """Where the header says that rows have one."""
    path = written(tmp_path)
    lines, plain = path.read_bytes().splitlines(keepends=True), unsigned(path)
    path.write_bytes(b"".join([*lines[:3], plain[3], *lines[4:]]))
    rows, (damaged,) = read(tmp_path)
    assert len(rows) == ROWS - 1
    assert damaged.endswith("its checksum is missing")


@pytest.mark.parametrize("between", [b"", b" ", b"\0" * 600, b'{"n":3,"st'])
def test_rows_on_one_line_are_found(tmp_path: Path, between: bytes) -> None:
    """Where the end of a line was lost, and where zeros or half a row of a power failure precede a row."""
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3][:-1] + between
    path.write_bytes(b"".join(lines))
    rows, damaged = read(tmp_path)
    assert ([number for number, _ in rows], len(damaged)) == (list(range(ROWS)), 1)


def test_many_ends_in_one_line_are_soon_looked_at() -> None:
    """Each would cost a checksum over all before it: a line of a megabyte took an hour."""
    damaged = b'{"n":' + b',"crc32":"00000000"}' * 50_000 + with_checksum(b'{"n":1}\n')
    assert intact_lines(damaged + b"x", b'{"n":') == [with_checksum(b'{"n":1}\n')]


def test_issues_of_a_row_are_bounded(tmp_path: Path) -> None:
    """A million empty ones, 3 MB, take 200 MB in each row; those of this process are as they were."""
    line = encode_row(0, Record(step=1, time=1.0, metrics={}, issues=({},) * 3000), tmp_path)
    assert [len(decode_row(line, tmp_path, trusted=own)[1].issues) for own in (False, True)] == [1000, 3000]


def test_line_names_its_checksum() -> None:
    """It is the last entry, over all that precedes it, so that any program can check it."""
    line = with_checksum(b'{"n":1,"a":"x"}\n')
    values = json.loads(line)
    assert list(values) == ["n", "a", CHECKSUM]
    assert int(values[CHECKSUM], 16) == zlib.crc32(b'{"n":1,"a":"x"')
    assert is_intact(line)
    assert is_intact(b'{"n":1}\n') is None
    assert intact_lines(b"garbage" + line, b'{"n":') == [line]


def test_either_checksum_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever package the writer had, the reader needs none."""
    body = b'{"n":1,"a":2'
    for name, function in (("crc32", zlib.crc32), ("crc32c", crc32c)):
        line = body + f',"{name}":"{function(body):08x}"}}\n'.encode()
        assert is_intact(line)
        assert not is_intact(line.replace(b'"a":2', b'"a":3'))
    assert checksums.crc32c(b"123456789") == 0xE3069283
