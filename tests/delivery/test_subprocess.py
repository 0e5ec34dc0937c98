"""A backend that works in a process of its own delivers like one that works here, and does not outlive the training."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradtrack import GradientManager
from gradtrack.delivery.delivery import Delivery
from gradtrack.delivery.subprocess import ProcessBackend, last_words, outsourced
from gradtrack.errors import BackendError, PermanentBackendError
from gradtrack.records import Record
from tests.delivery import strategies
from tests.delivery.doubles import ROOT, RUN, WAIT_SECONDS, Recorder, row
from tests.delivery.elsewhere import FolderBackend, rows_in, told_in, writers_in
from tests.training import train


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[ProcessBackend]:
    """Give a backend in a process of its own, which ends with the test."""
    made = outsourced(FolderBackend(str(tmp_path)))
    assert isinstance(made, ProcessBackend)
    yield made
    made.close()


def gone(pid: int) -> bool:
    """Say whether a process ends before the patience does."""
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(strategies.records, min_size=1, max_size=4))
def test_records_arrive_as_they_were_sent(backend: ProcessBackend, tmp_path: Path, records: list[Record]) -> None:
    """Whatever a record holds, the other process sees the same."""
    quiet = [dataclasses.replace(record, source=f"x{record.source}") for record in records]
    (tmp_path / "rows").unlink(missing_ok=True)
    backend.write(quiet)
    assert repr(rows_in(tmp_path)) == repr(quiet)


def test_work_is_done_elsewhere_by_one_process(backend: ProcessBackend, tmp_path: Path) -> None:
    """All calls reach one other process, which knows the run, and its address comes back."""
    backend.write([dataclasses.replace(row(1), run=dataclasses.replace(RUN, run_dir="/somewhere"))])
    pid = backend.pid
    backend.write([row(2)])
    backend.flush()
    assert pid not in (None, os.getpid())
    assert writers_in(tmp_path) == [pid, pid]
    assert backend.present([row(2), row(3)]) == {("", 2)}
    assert backend.address()["writer"] == pid
    assert told_in(tmp_path) == ["prepare", "run run-1 /somewhere", "flush", "present 2"]


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="the system has no priorities of processes")
def test_the_training_goes_first(backend: ProcessBackend) -> None:
    """The system gives the process the time that the training leaves."""
    backend.write([row(1)])
    assert backend.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, backend.pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)


def test_no_process_starts_without_a_record(backend: ProcessBackend, tmp_path: Path) -> None:
    """A training that records nothing starts no process, and its close has nothing to tell."""
    backend.flush()
    assert backend.address() == {"folder": str(tmp_path), "writer": os.getpid()}
    backend.close()
    assert backend.pid is None
    assert told_in(tmp_path) == []


def test_process_starts_with_the_training(tmp_path: Path) -> None:
    """A manager that is only made starts nothing; the first step starts the process, before its row is delivered."""
    backend = FolderBackend(str(tmp_path))
    GradientManager(backends=[backend]).close()
    assert told_in(tmp_path) == []
    with GradientManager(backends=[backend], run_dir=tmp_path / "run", save_gradient_plots=False) as manager:
        train(manager, 1)
    told = told_in(tmp_path)
    assert [line.partition(" ")[0] for line in told] == ["prepare", "run", "close"]


def test_end_of_a_run_of_this_process_is_heard_of_here(tmp_path: Path) -> None:
    """Who asks to be told before a user ends a run is told in this process, where the run is."""
    asked: list[object] = []

    class Listening(FolderBackend):
        def before_end(self, deliver: Callable[[], object]) -> None:
            asked.append(deliver)

    made = outsourced(Listening(str(tmp_path)))
    assert isinstance(made, ProcessBackend)
    deliver = object
    made.before_end(deliver)
    made.close()
    assert asked == [deliver]


def test_close_ends_the_process_once(backend: ProcessBackend, tmp_path: Path) -> None:
    """The other process closes its backend as we were told to, and is gone; a second close does nothing."""
    backend.write([row(1)])
    pid = backend.pid
    assert pid is not None
    backend.close(failed=True)
    backend.close()
    assert gone(pid)
    assert told_in(tmp_path) == ["prepare", "close True"]


@pytest.mark.parametrize(
    ("source", "kind", "text"),
    [("permanent", PermanentBackendError, "never takes this"), ("broken", BackendError, "ZeroDivisionError: seven")],
)
def test_errors_keep_their_kind(backend: ProcessBackend, source: str, kind: type[Exception], text: str) -> None:
    """What is raised there is raised here, and the process goes on."""
    with pytest.raises(kind, match=text) as caught:
        backend.write([row(1, source=source)])
    assert type(caught.value) is kind
    backend.write([row(2)])


def test_log_and_prints_stay_apart(backend: ProcessBackend, caplog: pytest.LogCaptureFixture) -> None:
    """Messages of gradtrack's logger appear in our log, and a tracker that prints does no harm."""
    backend.write([row(1, source="log"), row(2, source="print")])
    assert caplog.messages == ["folder: something to know"]


def test_killed_process_is_replaced(tmp_path: Path) -> None:
    """A process that dies is an error with its last words but no secret; the next one is told of run and panels."""
    backend = outsourced(FolderBackend(str(tmp_path), token="api_key=hunter2secret"))
    backend.write([dataclasses.replace(row(1), run=RUN)])
    with pytest.raises(BackendError, match=r"gone .*ended with -9.*last words with api_key") as caught:
        backend.write([row(2, source="once")])
    assert "hunter2secret" not in str(caught.value)
    backend.write([row(2, source="once")])
    backend.close()
    assert [record.step for record in rows_in(tmp_path)] == [1, 2]
    assert told_in(tmp_path) == ["prepare", "run run-1 None", "prepare", "run run-1 None", "close False"]


@pytest.mark.parametrize("trouble", ["path", "files"])
def test_process_that_cannot_start_does_not_reach_the_training(
    trouble: str, backend: ProcessBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that is no text is left out; whatever else fails is told by the first write, as a tracker's error."""
    if trouble == "path":
        monkeypatch.setattr(sys, "path", [*sys.path, Path("x")])
        backend.prepare()
        backend.write([row(1)])
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        backend.prepare()
        with pytest.raises(BackendError, match="No such file"):
            backend.write([row(1)])


@given(before=st.integers(0, 40_000), after=st.integers(0, 400))
def test_secret_is_hidden_wherever_the_words_are_cut(before: int, after: int) -> None:
    """What a process said last is cut after its secrets are hidden, not before."""
    said = last_words(io.BytesIO(b"y" * before + b" http://user:hunter2secret@host/ " + b"x" * after))
    assert "hunter2secret" not in said
    assert len(said) <= 300


def test_run_is_ended_although_its_idle_process_died(backend: ProcessBackend, tmp_path: Path) -> None:
    """A process that died after the last row, unseen, is replaced as well."""
    backend.write([dataclasses.replace(row(1), run=RUN)])
    assert backend.pid is not None
    os.kill(backend.pid, signal.SIGKILL)
    os.waitid(os.P_PID, backend.pid, os.WEXITED | os.WNOWAIT)
    backend.close()
    assert told_in(tmp_path)[-1] == "close False"


def test_run_is_ended_although_its_process_died(backend: ProcessBackend, tmp_path: Path) -> None:
    """A process that died between the last row and the close is replaced by one that finds the run and ends it."""
    backend.write([dataclasses.replace(row(1), run=RUN)])
    assert backend.pid is not None
    os.kill(backend.pid, signal.SIGKILL)
    with pytest.raises(BackendError, match="gone"):
        backend.flush()
    backend.close()
    assert told_in(tmp_path) == ["prepare", "run run-1 None", "prepare", "present 1", "close False"]


def test_delivery_survives_the_death_of_the_process(tmp_path: Path) -> None:
    """Rows that the process died over are delivered once by the next, and the run is told to be complete."""
    delivery = Delivery({"folder": outsourced(FolderBackend(str(tmp_path)))}, run=RUN)
    for step in range(1, 50):
        delivery.write(row(step, source="once" if step == 30 else ""))
    delivery.close()
    assert [record.step for record in rows_in(tmp_path)] == list(range(1, 50))
    assert delivery.status()["folder"]["acknowledged"] == 49
    assert told_in(tmp_path)[-1] == "close False"


def test_backend_here_learns_where_the_rows_go(tmp_path: Path) -> None:
    """The object that the user has is told the address that the other process found."""
    backend = FolderBackend(str(tmp_path))
    delivery = Delivery({"folder": outsourced(backend)}, run=RUN)
    delivery.write(row(1))
    delivery.close()
    assert backend.told["folder"] == str(tmp_path)
    assert backend.told["writer"] != os.getpid()


def test_backend_that_must_stay_stays() -> None:
    """A backend that names no options for another process works in this one."""
    backend = Recorder()
    assert outsourced(backend) is backend


def test_secrets_are_in_no_list_of_processes(tmp_path: Path) -> None:
    """The command line of the process shows none of the options."""
    backend = outsourced(FolderBackend(str(tmp_path), token="hunter2secret"))
    assert isinstance(backend, ProcessBackend)
    backend.write([row(1)])
    shown = subprocess.run(
        ["ps", "-ww", "-o", "args=", "-p", str(backend.pid)], capture_output=True, text=True, check=True
    )
    backend.close()
    assert "gradtrack" in shown.stdout
    assert "hunter2secret" not in shown.stdout


TRAINING = """
import os, sys, time
from gradtrack.delivery.subprocess import ProcessBackend
from tests.delivery.doubles import row
from tests.delivery.elsewhere import FolderBackend
backend = ProcessBackend(FolderBackend(sys.argv[1]), {"folder": sys.argv[1], "portable": False})
backend.write([row(1)])
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(60)
print(backend.pid, flush=True)
time.sleep(60)
"""


CLOSING = """
import os, subprocess, sys, time
from gradtrack.delivery.subprocess import ProcessBackend
from tests.delivery.doubles import row
from tests.delivery.elsewhere import FolderBackend
started = []
class Started(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        started.append(self)
subprocess.Popen = Started
backend = ProcessBackend(FolderBackend(sys.argv[1]), {"folder": sys.argv[1], "portable": False})
backend.write([row(1)])
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
backend.close()
print(*[process.returncode for process in started], flush=True)
"""


def test_process_leaves_after_the_close_although_a_copy_holds_its_pipe(tmp_path: Path) -> None:
    """A worker of a data loader that lives on keeps neither the process nor the close."""
    command = [sys.executable, "-c", CLOSING, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as training:
        assert training.stdout is not None
        code = training.stdout.readline()
        os.killpg(training.pid, signal.SIGKILL)
    assert code == "0\n"  # it was not killed for its silence
    assert told_in(tmp_path)[-1] == "close False"


@pytest.mark.parametrize("copies", ["alone", pytest.param("fork", marks=pytest.mark.slow)])
def test_process_goes_when_the_training_is_killed(tmp_path: Path, copies: str) -> None:
    """Nothing is left of a training that was killed, even while a forked copy holds its pipes open."""
    command = [sys.executable, "-c", TRAINING, str(tmp_path), copies]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as training:
        assert training.stdout is not None
        pid = int(training.stdout.readline())
        training.kill()
        training.wait()
        try:
            assert gone(pid)
        finally:
            if copies == "fork":
                os.killpg(training.pid, signal.SIGKILL)


def test_interrupt_from_the_keyboard_is_for_the_training(backend: ProcessBackend) -> None:
    """The process is in a group of its own, which a signal from the terminal does not reach."""
    backend.write([row(1)])
    assert backend.pid is not None
    assert os.getpgid(backend.pid) != os.getpgid(0)
