"""Every row reaches every backend once, in order, and training never waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.backends.base import Backend
from gradtrack.backends.memory import MemoryBackend
from gradtrack.delivery import worker as worker_module
from gradtrack.delivery.delivery import Delivery
from gradtrack.delivery.journal.offsets import offsets_path, read_offsets
from gradtrack.delivery.journal.writing import Journal
from gradtrack.delivery.writer import Feed
from gradtrack.errors import BackendError, PermanentBackendError
from gradtrack.records import Panel, Record
from tests.delivery.doubles import RUN, Gate, Recorder, join_worker, row


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again without much waiting."""
    monkeypatch.setattr(worker_module, "_FIRST_DELAY_SECONDS", 0.001)
    monkeypatch.setattr(worker_module, "_CLOSING_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(worker_module, "_GATHER_SECONDS", 0.0)


def deliver(directory: Path | None, backend: Backend, **options: Any) -> Delivery:
    """Open a delivery to one backend."""
    journal = None if directory is None else Journal(directory, RUN)
    return Delivery({"recorder": backend}, run=RUN, journal=journal, **options)


def delivered(directory: Path | None, backend: Backend, *rows: Record, **options: Any) -> Delivery:
    """Deliver rows to one backend and close."""
    delivery = deliver(directory, backend, **options)
    for found in rows:
        delivery.write(found)
    delivery.close()
    return delivery


def status(delivery: Delivery) -> dict[str, Any]:
    """Return what is told of the one backend."""
    return delivery.status()["recorder"]


class Failing:
    """A backend's beginning that fails so many times."""

    def __init__(self, times: int, fault: BaseException) -> None:
        self.times, self.fault = times, fault

    def __call__(self, records: Sequence[Record]) -> None:
        """Fail, as long as there are times left."""
        if self.times:
            self.times -= 1
            raise self.fault


def test_rows_arrive_once_and_in_order(tmp_path: Path) -> None:
    """After the close a backend has every row, the run with the first one, and was closed once."""
    recorder = Recorder()
    delivery = delivered(tmp_path, recorder, *map(row, range(1000)))
    assert recorder.steps == list(range(1000))
    assert [record.run for record in recorder.records] == [RUN, *[None] * 999]
    assert recorder.closed == [False]
    assert status(delivery)["acknowledged"] == 1000


def test_many_steps_travel_together(tmp_path: Path) -> None:
    """Rows that came while a tracker was busy go in batches."""
    gate = Gate()
    recorder = Recorder(gate)
    delivery = deliver(tmp_path, recorder)
    delivery.write(row(0))
    assert gate.entered.wait(30)
    for step in range(1, 1001):
        delivery.write(row(step))
    gate.opened.set()
    delivery.close()
    assert len(recorder.batches) <= 6


def test_what_waits_is_written_before_the_next_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker rests once for all the rows that were there, not after each batch of them."""
    rested: list[int] = []
    monkeypatch.setattr(worker_module.Worker, "_rest", lambda self, _: rested.append(self.feed.position))
    gate = Gate()
    recorder = Recorder(gate)
    delivery = deliver(tmp_path, recorder)
    delivery.write(row(0))
    assert gate.entered.wait(30)
    for step in range(1, 601):
        delivery.write(row(step))
    gate.opened.set()
    recorder.wait_for(601)
    delivery.close()
    assert recorder.batches == [1, 256, 256, 88]
    assert set(rested) <= {1, 601}


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Recorder, Delivery]:
    """Give a backend that has one row, and whose worker rests until it is needed."""
    monkeypatch.setattr(worker_module, "_GATHER_SECONDS", 3600.0)
    monkeypatch.setattr(worker_module, "_LONGEST_REST_SECONDS", 3600.0)
    monkeypatch.setattr(worker_module, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(worker_module, "_MANY_ROWS", 10)
    recorder = Recorder()
    delivery = deliver(tmp_path, recorder)
    delivery.write(row(0))
    recorder.wait_for(1)
    for step in range(1, 9):
        delivery.write(row(step))
    return recorder, delivery


def test_flush_and_close_end_a_rest(resting: tuple[Recorder, Delivery]) -> None:
    """Rows that came while a worker rested go together as soon as a flush waits for them."""
    recorder, delivery = resting
    delivery.flush()
    assert recorder.batches == [1, 8]
    delivery.write(row(9))
    delivery.close()
    assert recorder.batches == [1, 8, 1]


def test_many_waiting_rows_end_a_rest(resting: tuple[Recorder, Delivery]) -> None:
    """A worker does not rest while rows heap up."""
    recorder, delivery = resting
    for step in range(9, 12):
        delivery.write(row(step))
    recorder.wait_for(11)
    delivery.close()


@given(st.integers(1, 8), st.integers(1, 60))
def test_full_queue_neither_blocks_nor_drops(limit: int, count: int) -> None:
    """Whatever does not fit into the queue comes from the journal, in its place."""
    feed = Feed(_Endless(), limit=limit)  # type: ignore[arg-type]
    taken: list[int] = []
    for number in range(count):
        feed.offer(number, row(number), kept=True)
        if number % 7 == 3:
            taken += [found for found, _ in feed.take(3, 0.0)]
    while rows := feed.take(5, 0.0):
        taken += [number for number, _ in rows]
        assert [record.step for _, record in rows] == [number for number, _ in rows]
    assert taken == list(range(count))
    assert feed.lost == 0


class _Endless:
    """A journal that has every row."""

    def reread(self, start: int) -> Iterator[tuple[int, Record]]:
        number = start
        while True:
            yield number, row(number)
            number += 1


@given(st.integers(1, 8), st.lists(st.booleans(), max_size=60))
def test_rows_that_are_nowhere_are_counted(limit: int, kept: list[bool]) -> None:
    """A row that neither the journal nor the queue could keep is lost and counted; no other is."""

    class Partial:
        def reread(self, start: int) -> Iterator[tuple[int, Record]]:
            return ((number, row(number)) for number in range(start, len(kept)) if kept[number])

    feed = Feed(Partial(), limit=limit)  # type: ignore[arg-type]
    for number, known in enumerate(kept):
        feed.offer(number, row(number), kept=known)
    taken: list[int] = []
    while feed.position < feed.accepted:
        taken += [number for number, _ in feed.take(5, 0.0)]
    expected = [number for number, known in enumerate(kept) if known or number < limit]
    assert taken == expected
    assert feed.lost == len(kept) - len(expected)


def test_slow_tracker_lags_and_catches_up(tmp_path: Path) -> None:
    """With a queue of few rows and a tracker that stands still, everything arrives in the end."""
    gate = Gate()
    recorder = Recorder(gate)
    delivery = deliver(tmp_path, recorder, queue_rows=4)
    for step in range(500):
        delivery.write(row(step))
    assert gate.entered.wait(30)
    assert status(delivery)["lagging"]
    gate.opened.set()
    delivery.close()
    assert recorder.steps == list(range(500))
    assert not status(delivery)["lagging"]


@pytest.mark.parametrize("fault", [BackendError("down"), OSError("broken pipe"), RuntimeError("odd"), SystemExit(3)])
def test_rows_are_tried_again(tmp_path: Path, fault: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a tracker raises, the same rows come again until it takes them, with one warning."""
    recorder = Recorder(Failing(5, fault))
    delivered(tmp_path, recorder, *map(row, range(10)))
    assert recorder.steps == list(range(10))
    assert recorder.records[0].run == RUN
    assert len([entry for entry in caplog.records if "kept until it is back" in entry.message]) == 1


def test_tracker_that_stays_away_still_ends_in_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last of the time is not spent on attempts, so that what a backend has is settled and told as it is."""

    class Slow(Recorder):
        def close(self, *, failed: bool = False) -> None:
            time.sleep(0.05)
            super().close(failed=failed)

    recorder = Slow(Failing(1000, OSError("gone")))
    delivery = deliver(tmp_path, recorder, close_timeout_seconds=2.0)
    delivery.write(row(1))
    delivery.close()
    assert recorder.closed
    assert status(delivery)["unsettled"] is None
    assert "recorder has 0 of 1 rows (1 pending: OSError: gone)" in caplog.text


def test_distinct_failures_are_each_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Failures that differ in numbers only are one kind; another kind is told as well."""
    faults: list[Exception] = [OSError(f"port {number} at 0x{number:x}f") for number in range(5)]
    faults.insert(2, ValueError("another"))

    def fail(records: Sequence[Record]) -> None:
        if faults:
            raise faults.pop(0)

    delivered(tmp_path, Recorder(fail), row(1))
    assert [entry.levelname for entry in caplog.records if "until it is back" in entry.message] == ["WARNING"] * 2


def test_half_written_batch_is_not_written_twice(tmp_path: Path) -> None:
    """Rows that arrived before a failure are left out of the next attempt, where the destination can tell."""

    class Half(Recorder):
        broken = True

        def write(self, records: Sequence[Record]) -> None:
            if self.broken and len(records) > 1:
                self.broken = False
                super().write(records[: len(records) // 2])
                raise OSError("connection lost")
            super().write(records)

        def present(self, records: Sequence[Record]) -> set[tuple[str, int]]:
            return {(record.source, record.step) for record in self.records}

    gate = Gate()
    recorder = Half(gate)
    delivery = deliver(tmp_path, recorder)
    panel = Panel(title="a", section="b", metrics=("c",))
    for step in range(20):
        delivery.write(row(step, panels=(panel,) if step == 1 else ()))
    gate.opened.set()
    delivery.close()
    assert recorder.steps == list(range(20))
    assert status(delivery)["acknowledged"] == 20


@given(st.sets(st.integers(0, 39)))
def test_refused_rows_do_not_take_others_with_them(refused: set[int]) -> None:
    """Of a batch with rows that a tracker will never take, all others arrive, and those are counted."""
    gate = Gate()

    def refuse(records: Sequence[Record]) -> None:
        gate(records)
        if any(record.step in refused for record in records):
            raise PermanentBackendError("bad row")

    recorder = Recorder(refuse)
    delivery = deliver(None, recorder)
    for step in range(40):
        delivery.write(row(step))
    gate.opened.set()
    delivery.close()
    hopeless = status(delivery)["refused"] > len(refused)
    assert hopeless or recorder.steps == [step for step in range(40) if step not in refused]
    assert status(delivery)["refused"] + status(delivery)["acknowledged"] == 40


def test_tracker_that_refuses_everything_is_not_asked_for_every_row(tmp_path: Path) -> None:
    """A run that was deleted is noticed after some refusals, and its rows stay in the journal."""
    calls = 0

    def refuse(records: Sequence[Record]) -> None:
        nonlocal calls
        calls += 1
        gate(records)
        raise PermanentBackendError("no such run")

    gate = Gate()
    delivery = deliver(tmp_path, Recorder(refuse))
    for step in range(5000):
        delivery.write(row(step))
    gate.opened.set()
    delivery.close()
    assert status(delivery)["refused"] == 5000
    assert calls < 100


def test_raising_inline_backend_misses_its_row_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A backend that runs within the step is contained there too, and others get the row."""
    broken, memory = MemoryBackend(), MemoryBackend()
    broken.close()
    delivery = Delivery({"broken": broken, "memory": memory}, run=RUN)
    delivery.write(row(1))
    delivery.write(row(2))
    assert [record.step for record in memory.records] == [1, 2]
    assert memory.records[0].run == RUN
    assert delivery.status()["broken"]["lost"] == 2
    assert len(caplog.records) == 1


def test_close_meets_its_deadline_with_a_write_that_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tracker that never answers holds up no close, and the last line says where the rows are."""
    gate = Gate()
    delivered(tmp_path, Recorder(gate), row(1), row(2), close_timeout_seconds=0.05)
    last = caplog.records[-1]
    assert last.levelname == "WARNING"
    assert "recorder has 0 of 2 rows (2 pending" in last.message
    assert f"The rest is in {tmp_path / 'journal-000.jsonl'}" in last.message
    assert last.message.endswith(f"gradtrack replay {tmp_path}")
    gate.opened.set()


def test_no_write_begins_after_the_deadline(tmp_path: Path) -> None:
    """What was given up is left to a replay, which would otherwise meet a second writer."""
    gate = Gate()
    recorder = Recorder(gate)
    delivery = deliver(tmp_path, recorder, close_timeout_seconds=0.05)
    delivery.write(row(1))
    assert gate.entered.wait(30)
    delivery.write(row(2))
    delivery.close()
    gate.opened.set()
    join_worker("recorder")
    assert recorder.steps == [1]
    assert recorder.closed == [False]
    assert read_offsets(offsets_path(tmp_path / "journal-000.jsonl"))["recorder"]["next"] == 1


def test_complete_run_is_summed_up_quietly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing is missing, the last line is information."""
    caplog.set_level(logging.INFO, "gradtrack")
    delivered(tmp_path, Recorder(), row(1))
    assert [(entry.levelname, entry.message) for entry in caplog.records] == [
        ("INFO", "run run-1: recorder has 1 of 1 rows")
    ]


def test_failed_close_is_not_called_an_arrival(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tracker that breaks while it is closed may not have kept what it took, and the last line says so."""

    class Breaking(Recorder):
        def close(self, *, failed: bool = False) -> None:
            raise OSError("no space left")

    delivered(tmp_path, Breaking(), row(1))
    assert caplog.records[-1].levelname == "WARNING"
    assert "recorder took, but may not have kept, 1 of 1 rows (OSError: no space left)" in caplog.records[-1].message
    assert "gradtrack replay" in caplog.records[-1].message


def test_backend_can_ask_for_what_waits(tmp_path: Path) -> None:
    """A backend whose run is about to end gets every row until then, and a fault of it stays its own."""

    class Ending(Recorder):
        def before_end(self, deliver: Callable[[], object]) -> None:
            self.deliver = deliver

    class Breaking(Recorder):
        def before_end(self, deliver: Callable[[], object]) -> None:
            raise OSError("odd")

    ending, breaking = Ending(), Breaking()
    delivery = Delivery(
        {"ending": ending, "breaking": breaking}, run=RUN, journal=Journal(tmp_path, RUN), close_timeout_seconds=30.0
    )
    for step in range(50):
        delivery.write(row(step))
    ending.deliver()
    assert ending.steps == list(range(50))
    delivery.close()
    ending.deliver()
    assert breaking.steps == list(range(50))


def test_backend_learns_that_training_failed(tmp_path: Path) -> None:
    """The close says whether training raised."""
    recorder = Recorder()
    delivery = deliver(tmp_path, recorder)
    delivery.write(row(1))
    delivery.close(failed=True)
    assert recorder.closed == [True]


def test_flush_waits_for_what_was_written_before(tmp_path: Path) -> None:
    """After a flush a backend has the rows and was told to keep them."""
    recorder = Recorder()
    delivery = deliver(tmp_path, recorder)
    for step in range(100):
        delivery.write(row(step))
    delivery.flush()
    assert recorder.steps == list(range(100))
    assert recorder.flushes == 1
    delivery.close()


def test_offsets_tell_how_far_a_backend_is(tmp_path: Path) -> None:
    """The acknowledged row, the refused ones and the address lie next to the journal, for the owner only."""

    class Placed(Recorder):
        def address(self) -> dict[str, Any]:
            return {"run_id": "abc"}

    def refuse(records: Sequence[Record]) -> None:
        if any(record.step == 3 for record in records):
            raise PermanentBackendError("bad")

    delivered(tmp_path, Placed(refuse), *map(row, range(10)))
    path = offsets_path(tmp_path / "journal-000.jsonl")
    assert read_offsets(path) == {"recorder": {"next": 10, "refused": [3], "address": {"run_id": "abc"}}}
    assert path.stat().st_mode & 0o777 == 0o600


ENDLESS = '{"gradtrack_offsets": 1, "backends": {"json": {"next": 1e999, "refused": [], "address": {}}}}'


@pytest.mark.parametrize("content", ["", "{", "[]", '{"gradtrack_offsets": 9}', '{"gradtrack_offsets": 1}', ENDLESS])
def test_damaged_offsets_count_as_none(tmp_path: Path, content: str) -> None:
    """Offsets are a hint: without them everything is asked for."""
    (tmp_path / "offsets.json").write_text(content)
    assert read_offsets(tmp_path / "offsets.json") == {}


def test_unwritable_journal_does_not_keep_rows_from_trackers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a journal rows go through memory, and the loss of it is told once and at the end."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    recorder = Recorder()
    delivery = delivered(blocked, recorder, *map(row, range(20)))
    assert recorder.steps == list(range(20))
    assert delivery.journal_status() is not None
    assert (delivery.journal_status() or {})["failed"] == 20
    assert len(caplog.records) == 2
    assert "20 rows are not in the journal" in caplog.records[-1].message


def test_rows_are_lost_where_neither_journal_nor_tracker_takes_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the status nor the last line of the run says that they wait or that a replay could bring them."""
    blocked = tmp_path / "run"
    blocked.write_text("a file where the directory should be")

    def fail(_: object) -> None:
        raise OSError("down")

    recorder = Recorder(fail)
    delivery = Delivery({"recorder": recorder}, run=RUN, journal=Journal(blocked, RUN), close_timeout_seconds=0.5)
    for step in range(10):
        delivery.write(row(step))
    assert "10 rows are only in memory" in str(delivery.status()["recorder"]["why"])
    delivery.close()
    found = delivery.status()["recorder"]
    assert (found["accepted"], found["acknowledged"], found["pending"], found["lost"]) == (10, 0, 0, 10)
    assert "10 lost" in caplog.records[-1].message
    assert "gradtrack replay" not in caplog.records[-1].message
    assert "journal keeps" not in caplog.text


def test_row_that_is_nowhere_is_reported_as_lost(tmp_path: Path) -> None:
    """With neither a journal nor room in the queue a row is gone, and the status says so."""
    gate = Gate()
    delivery = deliver(None, Recorder(gate), queue_rows=5)
    delivery.write(row(0))
    assert gate.entered.wait(30)
    for step in range(1, 21):
        delivery.write(row(step))
    gate.opened.set()
    delivery.close()
    found = status(delivery)
    assert (found["accepted"], found["acknowledged"], found["lost"], found["pending"]) == (21, 6, 15, 0)
    assert found["dropped"] == 15


@pytest.mark.parametrize("bad", [None, 1j, "1.5", 10**400, object(), [1.0]])
def test_case_17_bad_metric_is_left_out_by_name(tmp_path: Path, bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One value that is no number costs neither its row nor its batch, and is told with its name."""
    recorder = Recorder()
    delivered(
        tmp_path,
        recorder,
        row(1, metrics={"good": 1, "odd": bad, "also": True}),
        row(2, metrics={"good": 2.0, "odd": bad}),
    )
    assert [record.metrics for record in recorder.records] == [{"good": 1.0, "also": 1.0}, {"good": 2.0}]
    assert len(caplog.records) == 1
    assert "'odd' at step 1" in caplog.records[0].message


@pytest.mark.parametrize("name", [None, 3, "", b"bytes"])
def test_case_17_bad_name_is_left_out(tmp_path: Path, name: Any) -> None:
    """A name that is no text keeps only its own value from arriving."""
    recorder = Recorder()
    delivered(tmp_path, recorder, row(1, metrics={name: 1.0, "good": 2.0}))
    assert recorder.records[0].metrics == {"good": 2.0}


@pytest.mark.parametrize("step", [1.5, None, True, "1", 2**63, -(2**63) - 1])
def test_case_19_impossible_steps_are_refused_at_once(step: Any) -> None:
    """A step that no tracker could keep is an error where the record is made."""
    with pytest.raises((TypeError, ValueError), match=r"record step .*: expected"):
        Record(step=step, time=1.0)


def test_case_19_repeated_and_falling_steps_all_arrive(tmp_path: Path) -> None:
    """A training that was resumed from a checkpoint records steps again; none of its rows is dropped."""
    steps = [5, 5, 3, 4, 5, -1, 0, 5]
    recorder = Recorder(Failing(1, OSError("down")))
    delivery = deliver(tmp_path, recorder)
    for step in steps:
        delivery.write(Record(step=step, time=1.0))
    delivery.close()
    assert recorder.steps == steps


def test_only_rank_0_talks_to_backends(tmp_path: Path) -> None:
    """Another rank journals its rows and leaves every backend alone."""
    recorder, memory = Recorder(), MemoryBackend()
    journal = Journal(tmp_path, RUN, rank=2)
    delivery = Delivery({"recorder": recorder, "memory": memory}, run=RUN, journal=journal, rank=2)
    delivery.write(row(1))
    delivery.close()
    assert (recorder.records, recorder.closed, memory.records) == ([], [], [])
    assert (tmp_path / "journal-rank2-000.jsonl").exists()


def test_backend_is_let_go_where_no_thread_can_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the interpreter exits no thread starts; the tracker is closed all the same, and no row is claimed."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    recorder = Recorder()
    delivery = delivered(tmp_path, recorder, row(1))
    assert recorder.closed == [False]
    assert status(delivery)["pending"] == 1


def test_workers_never_keep_the_interpreter(tmp_path: Path) -> None:
    """All threads of a delivery are daemons."""
    before = set(threading.enumerate())
    delivery = deliver(tmp_path, Recorder())
    delivery.write(row(1))
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    delivery.close()
    assert [thread.name for thread in set(threading.enumerate()) - before] == []


def test_a_worker_that_waits_is_told_of_a_row_at_once() -> None:
    """It does not sleep until its patience ends."""
    feed, taken = Feed(None), list[int]()
    waiting = threading.Thread(target=lambda: taken.extend(number for number, _ in feed.take(8, 600.0)), daemon=True)
    waiting.start()
    while not feed._waits:
        waiting.join(0.001)
    feed.offer(0, Record(step=1, time=0.0), kept=True)
    waiting.join(60.0)
    assert taken == [0]
