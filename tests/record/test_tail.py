"""Rows of usual steps are in the hands of the system at once, and lines of the journal soon."""

from __future__ import annotations

import errno
import os
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.record import journal as journal_module
from gradtrack.record import packing as packing_module
from gradtrack.record import tail as tail_module
from gradtrack.record.delivery import Delivery
from gradtrack.record.journal import Journal, Limits
from gradtrack.record.packed import NO_EPOCH, NO_LOSS, ROW_BYTES, Terms, number_of, pack, unpack_row
from gradtrack.record.reading import find_journals
from gradtrack.record.replay import replay
from gradtrack.record.tail import END, Tail, read_tail
from tests.record.doubles import RUN, Recorder, in_child, row
from tests.record.training import journaled_steps, run_script

TERMS = Terms("", 10, "norm", 1.0, 1e-6, "none", True)
OTHERS = TERMS._replace(source="critic", limit=None)
TOTAL = struct.pack("<8d", 1.0, 4.0, -1.0, 1.5, 2.0, 0.0, 0.0, 0.0)
HEADER = tail_module._HEADER_BYTES


def packed(number: int, step: int | None = None) -> bytes:
    """Make a row."""
    return pack(number + 1, 0, number if step is None else step, NO_EPOCH, 5.0, 0.5, 2.0, 0.25, TOTAL, number + 1)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Delivery, Recorder]]:
    """A delivery that has its first row, and a backend that takes what comes."""
    recorder = Recorder()
    delivery = Delivery({"recorder": recorder}, run=RUN, journal=Journal(tmp_path, RUN))
    delivery.write(row(0))
    yield delivery, recorder
    delivery.close()


def put(delivery: Delivery, *steps: int, terms: Terms = TERMS) -> None:
    """Put rows of usual steps on their way."""
    take = delivery.packed(terms)
    assert take is not None
    for step in steps:
        take(step, 5.0, None, 0.5, 2.0, 0.25, TOTAL)


@given(
    st.integers(0, 2**62), st.integers(-(2**62), 2**62), st.none() | st.integers(-5, 5), st.none() | st.floats(-9, 9)
)
def test_a_row_comes_back_as_it_was(number: int, step: int, epoch: int | None, loss: float | None) -> None:
    """Number, step, time, epoch and loss, with the metrics that follow from the sums."""
    told = NO_EPOCH if epoch is None else epoch, 7.5, NO_LOSS if loss is None else loss
    whole = pack(number + 1, 1, step, *told, 2.0, 0.25, TOTAL, number + 1)
    assert number_of(whole) == number
    found, record = unpack_row([OTHERS, TERMS], whole)
    assert (found, record.step, record.time, record.epoch, record.loss) == (number, step, 7.5, epoch, loss)
    assert record.metrics["train/grad_mean"] == 0.1
    assert record.metrics["train/grad_norm_clipped"] == pytest.approx(1.0, rel=1e-6)


@given(st.lists(st.integers(1, 30), max_size=6), st.integers(0, ROW_BYTES - 1))
def test_only_whole_new_rows_are_read(tmp_path_factory: pytest.TempPathFactory, rounds: list[int], cut: int) -> None:
    """Whatever earlier rounds have left behind them, and where the last row was cut off."""
    path = tmp_path_factory.mktemp("tail") / "journal-000.tail"
    tail, number = Tail(path, "run-1", 0), 0
    tail.tell([TERMS])
    for size in rounds:
        tail.rewind()
        for _ in range(size):
            tail.put(packed(number))
            number += 1
    start = tail.position - ROW_BYTES
    tail.let_go()
    last = sum(rounds[:-1]) - 1
    expected = list(range(last + 1, number))
    assert [found for found, _ in read_tail(path, "run-1", 0, last)] == expected
    assert [found for found, _ in read_tail(path, "run-1", 0, last + 2)] == expected[2:]
    assert list(read_tail(path, "run-2", 0, last)) == list(read_tail(path, "run-1", 1, last)) == []
    if rounds:
        with path.open("r+b") as stream:  # as where the power was lost
            stream.seek(start + cut)
            stream.write(bytes(ROW_BYTES - cut))
        whole = packed(number - 1)[cut:] == bytes(ROW_BYTES - cut)
        assert [found for found, _ in read_tail(path, "run-1", 0, last)] == (expected if whole else expected[:-1])


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\0" * END, b'{"gradtrack_tail": 9}', b"\xff" * 5000])
def test_what_is_no_tail_has_no_rows(tmp_path: Path, content: bytes) -> None:
    """Files that are empty, foreign, damaged or of another version are passed over."""
    (tmp_path / "journal-000.tail").write_bytes(content)
    assert list(read_tail(tmp_path / "journal-000.tail", "run-1", 0, -1)) == []
    assert list(read_tail(tmp_path / "missing.tail", "run-1", 0, -1)) == []


def test_rows_are_read_before_they_are_lines(tmp_path: Path, opened: tuple[Delivery, Recorder]) -> None:
    """Whoever reads the journal sees them at once."""
    put(opened[0], 1, 2, 3)
    assert journaled_steps(tmp_path) == [0, 1, 2, 3]
    assert (tmp_path / "journal-000.jsonl").read_bytes().count(b"\n") == 2


def test_rows_become_lines_in_their_order(tmp_path: Path, opened: tuple[Delivery, Recorder]) -> None:
    """Among those that are written one by one, at a flush and at the end; nothing else is left then."""
    delivery, recorder = opened
    put(delivery, 1, 2)
    delivery.write(row(3))
    put(delivery, 4)
    delivery.flush()
    assert recorder.steps == [0, 1, 2, 3, 4]
    put(delivery, 5, terms=TERMS._replace(limit=None))
    put(delivery, 6, 7)
    delivery.close()
    assert recorder.steps == journaled_steps(tmp_path) == list(range(8))
    assert "train/grad_clip_coef" not in recorder.records[5].metrics
    assert recorder.records[6].metrics["train/grad_clip_coef"] < 1
    assert not list(tmp_path.glob("*.tail"))


def test_the_tracker_gets_them_by_itself(opened: tuple[Delivery, Recorder]) -> None:
    """Nobody has to ask for it."""
    put(opened[0], 1, 2)
    opened[1].wait_for(3)


def test_they_are_made_durable_by_themselves(tmp_path: Path) -> None:
    """The thread that makes the journal durable writes their lines first."""
    journal = Journal(tmp_path, RUN, limits=Limits(sync_seconds=0.01))
    delivery = Delivery({}, run=RUN, journal=journal)
    delivery.write(row(0))
    put(delivery, 1, 2)
    journal.sync(30.0)
    assert (tmp_path / "journal-000.jsonl").read_bytes().count(b"\n") == 4
    delivery.close()


def test_there_are_more_than_have_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in which the room ends makes lines of them, and the room is used again."""
    monkeypatch.setattr(packing_module, "END", HEADER + 8 * ROW_BYTES)
    delivery = Delivery({}, run=RUN, journal=Journal(tmp_path, RUN))
    delivery.write(row(0))
    put(delivery, *range(1, 30))
    assert (tmp_path / "journal-000.tail").stat().st_size == END
    assert journaled_steps(tmp_path) == list(range(30))
    delivery.close()
    assert journaled_steps(tmp_path) == list(range(30))


def test_pairs_that_step_in_turns(tmp_path: Path, opened: tuple[Delivery, Recorder]) -> None:
    """Each row is of the pair that has put it on its way, also before it is a line."""
    delivery, recorder = opened
    first, second = delivery.packed(TERMS), delivery.packed(OTHERS)
    assert first is not None
    assert second is not None
    for step in range(1, 5):
        for take in (first, second):
            take(step, 5.0, None, 0.5, 2.0, 0.25, TOTAL)
    (journal,) = find_journals(tmp_path)
    expected = [("", 0), *((source, step) for step in range(1, 5) for source in ("", "critic"))]
    assert [(record.source, record.step) for _, record in journal.rows()] == expected
    delivery.flush()
    assert [(record.source, record.step) for record in recorder.records] == expected
    clipped = ["train/grad_clip_coef" in record.metrics for record in recorder.records[1:]]
    assert clipped == [True, False] * 4


def test_terms_that_change_at_every_step(tmp_path: Path, opened: tuple[Delivery, Recorder]) -> None:
    """As those of a schedule for the limit do: older ones are forgotten, and whoever still has them goes on."""
    delivery, recorder = opened
    first = delivery.packed(TERMS)
    assert first is not None
    for step in range(1, 41):
        put(delivery, 2 * step, terms=TERMS._replace(limit=float(step)))
        first(2 * step + 1, 5.0, None, 0.5, 2.0, 0.25, TOTAL)
    assert journaled_steps(tmp_path) == [0, *range(2, 82)]
    delivery.flush()
    limits = [record.metrics["train/grad_clip_threshold"] for record in recorder.records[1:]]
    assert limits == [limit for step in range(1, 41) for limit in (float(step), 1.0)]


def test_many_threads_put_rows(tmp_path: Path) -> None:
    """Each with terms of its own, while others ask: none is lost, doubled or taken for another's."""
    recorder = Recorder()
    delivery = Delivery({"recorder": recorder}, run=RUN, journal=Journal(tmp_path, RUN))
    delivery.write(row(0))

    def put_some(name: str) -> None:
        for step in range(200):
            put(delivery, step, terms=TERMS._replace(source=f"{name}{step // 10}"))
            if step % 50 == 0:
                delivery.status()
            if step % 7 == 0:
                delivery.write(row(step, source=f"{name}{step // 10}", metrics={"alone": 1.0}))

    threads = [threading.Thread(target=put_some, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    delivery.close()
    found = [(record.source, record.step) for record in recorder.records[1:] if "alone" not in record.metrics]
    assert len(recorder.records) == 601 + 3 * 29
    assert sorted(found) == sorted((f"{name}{step // 10}", step) for name in "abc" for step in range(200))
    (journal,) = find_journals(tmp_path)
    numbers = [number for number, _ in journal.rows()]
    assert numbers == list(range(601 + 3 * 29))


def test_a_part_that_is_full_ends_with_them(tmp_path: Path) -> None:
    """Lines that do not fit into a part begin the next."""
    delivery = Delivery({}, run=RUN, journal=Journal(tmp_path, RUN, limits=Limits(part_bytes=4000)))
    delivery.write(row(0))
    put(delivery, *range(1, 30))
    delivery.close()
    assert len(list(tmp_path.glob("*.jsonl"))) > 2
    assert journaled_steps(tmp_path) == list(range(30))


def test_case_14_the_tail_cannot_be_written(
    opened: tuple[Delivery, Recorder], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows are lines at once, which is said once."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    delivery, recorder = opened
    take = delivery.packed(TERMS)
    monkeypatch.setattr(os, "pwrite", full)
    assert take is not None
    for step in (1, 2):
        take(step, 5.0, None, 0.5, 2.0, 0.25, TOTAL)
    assert sum("no space left" in message for message in caplog.messages) == 1
    assert delivery._packed is not None
    assert not delivery._packed.packed
    delivery.flush()
    assert recorder.steps == [0, 1, 2]


def test_case_14_there_is_no_room_for_a_tail(
    opened: tuple[Delivery, Recorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Then every row is a line at once, and no file is left behind."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(tail_module, "_reserve", full)
    assert opened[0].packed(TERMS) is None
    assert not list(tmp_path.glob("*.tail"))


def test_case_15_the_directory_is_removed(tmp_path: Path) -> None:
    """Rows that wait go into the file that is begun then."""
    directory = tmp_path / "run"
    journal = Journal(directory, RUN)
    delivery = Delivery({}, run=RUN, journal=journal)
    delivery.write(row(0))
    put(delivery, 1)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    journal.syncer.unlinked = True
    delivery.close()
    assert journaled_steps(directory) == [1]


def test_case_15_the_files_are_removed_and_the_process_is_killed(tmp_path: Path) -> None:
    """Rows of afterwards are in a tail of their own as soon as those before it have become lines."""
    delivery = Delivery({}, run=RUN, journal=Journal(tmp_path, RUN))
    delivery.write(row(0))
    put(delivery, 1)
    for path in tmp_path.iterdir():
        path.unlink()
    delivery.journal_status()
    put(delivery, 2, 3)
    assert [found for found in tmp_path.glob("*.tail") if found.stat().st_nlink]
    content = next(tmp_path.glob("*.tail"))
    assert [record.step for _, record in read_tail(content, "run-1", 0, -1)] == [2, 3]
    delivery.close()


def test_a_tail_that_was_let_go_writes_to_no_other_file(tmp_path: Path) -> None:
    """Whoever has got its handle since."""
    tail = Tail(tmp_path / "journal-000.tail", "run-1", 0)
    tail.tell([TERMS])
    tail.let_go()
    others = [(tmp_path / str(index)).open("wb") for index in range(8)]
    with pytest.raises(OSError, match="Bad file"):
        tail.put(packed(0))
    for other in others:
        other.close()
        assert not Path(other.name).stat().st_size


def test_rows_that_the_journal_could_not_take_stay_in_the_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full to the end leaves them to a replay."""
    delivery = Delivery({}, run=RUN, journal=Journal(tmp_path, RUN))
    delivery.write(row(0))
    put(delivery, 1, 2)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(journal_module, "_write_whole", full)
    delivery.close()
    assert journaled_steps(tmp_path) == [0, 1, 2]


def test_before_the_first_row_there_is_no_tail(tmp_path: Path) -> None:
    """Nor without a journal, nor beside a backend that takes rows within the step."""

    class Inline(Recorder):
        inline = True

    assert Delivery({}, run=RUN, journal=Journal(tmp_path, RUN)).packed(TERMS) is None
    assert Delivery({}, run=RUN).packed(TERMS) is None
    delivery = Delivery({"inline": Inline()}, run=RUN, journal=Journal(tmp_path, RUN))
    delivery.write(row(0))
    assert delivery.packed(TERMS) is None


_USUAL = "loop = UsualLoop(sys.argv[1], ['json']); loop.run(300); "


def test_case_07_killed_between_usual_steps(tmp_path: Path) -> None:
    """The journal has every step, also those that were no lines yet, and a replay delivers each once."""
    done = run_script(f"{_USUAL}loop.assert_packed(); os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.glob("*.tail"))
    assert journaled_steps(tmp_path) == list(range(1, 301))
    assert replay(tmp_path)[0].complete
    assert replay(tmp_path)[0].delivered == 0
    (journal,) = find_journals(tmp_path)
    assert [record.metrics["train/grad_norm"] > 0 for _, record in journal.rows()] == [True] * 300


def test_case_21_usual_steps_before_an_exit_without_close(tmp_path: Path) -> None:
    """All of them are lines, and the tail is gone."""
    done = run_script(f"{_USUAL}loop.assert_packed()", tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("*.tail"))
    assert journaled_steps(tmp_path) == list(range(1, 301))


def test_case_20_a_fork_between_usual_steps(tmp_path: Path) -> None:
    """The copy neither writes to the tail nor removes it, whatever it does."""
    code = f"""{_USUAL}loop.assert_packed()
pid = os.fork()
if pid == 0:
    loop.run(50)
    loop.manager.close()
    os._exit(0)
os.waitpid(pid, 0)
assert list(Path(sys.argv[1]).glob("*.tail"))
loop.run(50)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run_script(code, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert journaled_steps(tmp_path) == list(range(1, 351))


def test_without_a_write_into_the_middle_of_a_file_there_is_no_tail(tmp_path: Path) -> None:
    """As on Windows: every row is a line at once."""
    code = """
import os, sys
del os.pwrite
from tests.record.training import UsualLoop
UsualLoop(sys.argv[1], ["json"]).run(100)
assert not [name for name in os.listdir(sys.argv[1]) if name.endswith(".tail")]
"""
    done = in_child(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert journaled_steps(tmp_path) == list(range(1, 101))
