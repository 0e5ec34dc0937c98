"""An interrupt from the keyboard, wherever in the delivery it strikes, costs no row but the one under way."""

from __future__ import annotations

import contextlib
import gc
import linecache
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gradtrack import GradientManager
from gradtrack.alerts.base import Alert, Message
from gradtrack.delivery import worker as worker_module
from gradtrack.delivery.delivery import Delivery
from gradtrack.delivery.journal.reading import find_journals
from gradtrack.delivery.journal.writing import Journal, is_being_written
from gradtrack.delivery.worker import Worker
from gradtrack.records import Record
from gradtrack.step.pair import Pair
from tests.delivery.doubles import RUN, WAIT_SECONDS, Gate, Recorder, join_worker, row
from tests.training import train

OURS = "/gradtrack/delivery/"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_GATHER_SECONDS", 0.0)


class Interrupt:
    """Raises KeyboardInterrupt at one line of the delivery, counted from zero, in this thread only."""

    def __init__(self, at: int) -> None:
        self.left, self.struck = at, False

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if OURS in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        # A tracer can strike between the body of a `with` and its exit; the interpreter looks for no signal there.
        leaving = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and not self.struck and not leaving:
            self.left -= 1
            if self.left < 0:
                self.struck = True
                raise KeyboardInterrupt
        return self._line


def interrupted(directory: Path, at: int) -> bool:
    """Deliver rows with an interrupt at one line, hold what arrived to the law, and say whether it struck."""
    recorder, returned = Recorder(), []
    delivery = Delivery({"recorder": recorder}, run=RUN, journal=Journal(directory, RUN))
    interrupt = Interrupt(at)
    for step in range(3):
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            delivery.write(row(step))
            returned.append(step)
    with contextlib.suppress(KeyboardInterrupt), interrupt:
        delivery.flush()
    with contextlib.suppress(KeyboardInterrupt), interrupt:
        delivery.close()
    delivery.close()
    join_worker("recorder")
    (journal,) = find_journals(directory)
    rows = list(journal.rows())
    assert journal.damaged == []
    assert len({number for number, _ in rows}) == len(rows)
    assert set(returned) <= {record.step for _, record in rows}
    assert set(recorder.steps) - {record.step for _, record in rows} == set()
    assert recorder.steps == [record.step for _, record in rows]
    found = delivery.status()["recorder"]
    assert found["acknowledged"] == len(rows)
    assert found["accepted"] == found["acknowledged"] + found["lost"]
    return interrupt.struck


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_interrupted_delivery_loses_nothing(tmp_path: Path, stride: int, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever it strikes, every row whose write returned is in journal and tracker once, and the end is told once."""
    at = 0
    while interrupted(tmp_path / str(at), at):
        assert sum("run run-1: recorder" in message for message in caplog.messages) <= 1
        caplog.clear()
        at += stride
    assert at > 100


def test_impatient_close_still_tells_where_the_rows_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who interrupts the wait of a close learns at once what is left and the command that delivers it."""
    gate = Gate()
    delivery = Delivery({"recorder": Recorder(gate)}, run=RUN, journal=Journal(tmp_path, RUN))
    delivery.write(row(1))
    assert gate.entered.wait(WAIT_SECONDS)
    join, joins = Worker.join, [_interrupt]
    monkeypatch.setattr(Worker, "join", lambda worker, seconds: joins.pop()() if joins else join(worker, seconds))
    with pytest.raises(KeyboardInterrupt):
        delivery.close()
    gate.opened.set()
    assert "recorder has 0 of 1 rows (1 pending: it was not waited for to the end)" in caplog.messages[-1]
    assert caplog.messages[-1].endswith(f"gradtrack replay {tmp_path}")
    delivery.close()
    join_worker("recorder")


def test_interrupted_manager_closes_its_trackers_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while pictures are drawn, or hooks taken off, leaves no tracker open."""
    recorder = Recorder()
    manager = GradientManager(backends=[recorder], run_dir=tmp_path, grad_log_every_n_steps=1)
    train(manager, 2)
    monkeypatch.setattr(Pair, "close", lambda pair: _interrupt())
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    assert (recorder.steps, recorder.closed) == ([1, 2], [False])


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_manager_that_its_own_worker_collects_is_closed(tmp_path: Path) -> None:
    """The collector may find a forgotten manager on the very thread that its close waits for."""
    dropped, closed = threading.Event(), threading.Event()

    class Collecting(Recorder):
        def write(self, records: Sequence[Record]) -> None:
            dropped.wait(WAIT_SECONDS)
            gc.collect()
            super().write(records)

        def close(self, *, failed: bool = False) -> None:
            super().close(failed=failed)
            closed.set()

    recorder = Collecting()
    manager = GradientManager(backends=[recorder], run_dir=tmp_path, grad_log_every_n_steps=1)
    train(manager, 3)
    manager.itself = manager  # type: ignore[attr-defined]
    gc.disable()
    try:
        del manager
        dropped.set()
        assert closed.wait(WAIT_SECONDS)
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name == "gradtrack-close":
            thread.join()
    assert recorder.steps == [1, 2, 3]
    assert not is_being_written(tmp_path / "journal-000.jsonl")


class Struck(Alert):
    """An alert that a signal strikes while it is closed, once."""

    def __init__(self, fault: type[BaseException]) -> None:
        self.fault, self.num_closed = fault, 0

    def send(self, message: Message) -> None:
        """Be posted to, which does not happen here."""

    def close(self) -> None:
        """Be struck by a signal, whose handler raises."""
        self.num_closed += 1
        if self.num_closed == 1:
            signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize("fault", [TimeoutError, KeyboardInterrupt])
def test_what_strikes_the_close_of_an_alert_reaches_the_training(fault: type[BaseException]) -> None:
    """An alert that never posted is closed on the main thread, where signals are heard; the next close ends well."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise fault

    before = signal.signal(signal.SIGALRM, handle)
    try:
        alert = Struck(fault)
        manager = GradientManager(alerts=[alert], backends=["memory"])
        train(manager, 3)
        with pytest.raises(fault):
            manager.close()
        manager.close()
        assert alert.num_closed >= 1
    finally:
        signal.signal(signal.SIGALRM, before)
