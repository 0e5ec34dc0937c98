"""Rows that a killed process of an earlier version left in the tail of its journal are read and replayed."""

from __future__ import annotations

import shutil
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.delivery.journal.reading import find_journals
from gradtrack.delivery.journal.tail import read_tail
from gradtrack.delivery.replay import replay

EARLIER = Path(__file__).parent / "earlier" / "killed"
"""A run of 120 steps, the last 19 of which were no lines when it was killed, as version 0.1.0 has left it."""
HEADER = 4096
ROW = 136


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A copy of that run."""
    shutil.copytree(EARLIER, tmp_path / "run")
    return tmp_path / "run"


def steps_of(directory: Path) -> list[int]:
    """Return the steps of the rows of a run, which have numbers of their own."""
    (journal,) = find_journals(directory)
    rows = list(journal.rows())
    assert len({number for number, _ in rows}) == len(rows)
    return [record.step for _, record in rows]


def test_every_row_of_a_killed_run_is_read(run_dir: Path) -> None:
    """Those of the tail come behind the lines, with the metrics that lines have."""
    (journal,) = find_journals(run_dir)
    records = [record for _, record in journal.rows()]
    assert [record.step for record in records] == list(range(1, 121))
    assert {frozenset(record.metrics) for record in records[50:]} == {frozenset(records[50].metrics)}
    # The training goes through the same eight batches again and again, at a small rate.
    for line, late in zip(records[93:101], records[109:117], strict=True):
        assert late.metrics["train/grad_norm"] == pytest.approx(line.metrics["train/grad_norm"], rel=5e-3)
        assert late.loss == pytest.approx(line.loss, rel=5e-3)
    assert journal.damaged == []


def test_a_replay_delivers_each_row_once(run_dir: Path) -> None:
    """Also the rows of the tail, and none of them again."""
    (first,) = replay(run_dir)
    assert (first.complete, first.rows) == (True, 120)
    (second,) = replay(run_dir)
    assert (second.delivered, second.rows) == (0, 120)


def test_rows_behind_newer_lines_are_read(run_dir: Path) -> None:
    """A disk that was full and free again left rows in the tail that are older than the last line."""
    path = run_dir / "journal-000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    newest = lines[-1].replace(b'"n":100,', b'"n":500,')
    assert newest != lines[-1], lines[-1][:80]
    path.write_bytes(b"".join([*lines[:-1], newest]))
    assert sorted(steps_of(run_dir)) == list(range(1, 121))


@given(st.integers(0, 19 * ROW - 1))
def test_half_a_row_ends_the_tail(cut: int) -> None:
    """Rows before it stay, wherever the file was cut off."""
    content = (EARLIER / "journal-000.tail").read_bytes()[: HEADER + cut]
    assert len(list(_read(content))) == cut // ROW


def _read(content: bytes) -> list[int]:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "journal-000.tail"
        path.write_bytes(content)
        (run,) = find_journals(EARLIER)
        return [number for number, _ in read_tail(path, run.run.run_id, 0, range(101))]


def test_rows_that_are_lines_are_read_once(run_dir: Path) -> None:
    """What an earlier round has left in the file is not read again."""
    assert steps_of(run_dir) == sorted(set(steps_of(run_dir)))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 5000, b'{"gradtrack_tail": 2}', b"[" * 5000])
def test_a_damaged_header_hides_no_line(run_dir: Path, content: bytes) -> None:
    """Files that are empty, foreign, damaged or of another version are passed over."""
    (run_dir / "journal-000.tail").write_bytes(content)
    assert steps_of(run_dir) == list(range(1, 102))


@given(st.integers(0, 19), st.integers(-(2**63), 2**63 - 1))
def test_unknown_terms_are_passed_over(row: int, index: int) -> None:
    """A row whose terms are damaged hides no other one."""
    content = bytearray((EARLIER / "journal-000.tail").read_bytes()[: HEADER + 19 * ROW])
    if row < 19:
        struct.pack_into("<q", content, HEADER + row * ROW + 8, index)
    assert len(_read(bytes(content))) == 19 - (row < 19 and index != 0)
