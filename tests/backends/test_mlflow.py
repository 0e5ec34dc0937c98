"""The MLflow backend against a real server on a sqlite store."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

mlflow: Any = pytest.importorskip("mlflow")

from gradtrack.backends.mlflow import MlflowBackend  # noqa: E402
from gradtrack.backends.mlflow.store import Store, metric_name  # noqa: E402
from gradtrack.backends.mlflow.views import saved_view  # noqa: E402
from gradtrack.delivery import replay as replaying  # noqa: E402
from gradtrack.delivery.delivery import Delivery  # noqa: E402
from gradtrack.delivery.journal.writing import Journal  # noqa: E402
from gradtrack.delivery.replay import replay  # noqa: E402
from gradtrack.delivery.run_files import RUN_END, RunEnd, note_files  # noqa: E402
from gradtrack.delivery.subprocess import ProcessBackend, outsourced  # noqa: E402
from gradtrack.errors import BackendError, ClosedError, PermanentBackendError, UsageError  # noqa: E402
from gradtrack.records import Panel, Record, RunInfo  # noqa: E402
from gradtrack.reports import TrainingSummary  # noqa: E402
from gradtrack.reports.panels import CORE_PANELS  # noqa: E402
from tests.backends.conftest import free_port, served  # noqa: E402
from tests.backends.rows import make_records  # noqa: E402
from tests.backends.stores import empty_store  # noqa: E402
from tests.processes import ROOT  # noqa: E402

NORM = "train/grad_norm"


@pytest.fixture
def server(mlflow_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the address of the server, with the settings of MLflow as they were afterwards."""
    before = mlflow.get_tracking_uri()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    mlflow.set_tracking_uri(mlflow_server)
    yield mlflow_server
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(before)


def history(address: str, run_id: str | None, name: str = NORM) -> list[tuple[int, int, float]]:
    """Return (step, timestamp, value) of a metric in the order of the steps."""
    points = mlflow.MlflowClient(tracking_uri=address).get_metric_history(run_id, name)
    return sorted((point.step, point.timestamp, point.value) for point in points)


def rows_of(records: list[Record], name: str = NORM) -> list[tuple[int, int, float]]:
    """Return what the history of a metric should be."""
    return [(record.step, round(record.time * 1000), record.metrics[name]) for record in records]


def new_identity() -> str:
    """Name a training that no other test knows."""
    return uuid.uuid4().hex


def test_training_leaves_the_work_to_another_process(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a delivery no row is written here; the run is made, filled and ended, and its number known here."""
    monkeypatch.setattr(MlflowBackend, "write", lambda self, records: pytest.fail("written in this process"))
    backend, records = MlflowBackend(experiment="elsewhere"), make_records(20)
    delivery = Delivery({"mlflow": outsourced(backend)}, run=RunInfo(run_id=new_identity()), close_timeout_seconds=60.0)
    for record in records:
        delivery.write(record)
    delivery.close(failed=True)
    assert delivery.status()["mlflow"]["acknowledged"] == 20
    assert history(server, backend.run_id) == rows_of(records)
    run = mlflow.get_run(backend.run_id)
    assert (run.info.status, run.info.lifecycle_stage) == ("FAILED", "active")


def test_process_that_dies_leaves_one_run(server: str) -> None:
    """A process that was killed is replaced by one that goes on in the same run, and ends it."""
    backend = MlflowBackend(experiment="killed")
    outside = outsourced(backend)
    assert isinstance(outside, ProcessBackend)
    records = make_records(20, run_id=new_identity())
    outside.write(records[:10])
    assert outside.pid is not None
    os.kill(outside.pid, signal.SIGKILL)
    with pytest.raises(BackendError, match="gone"):
        outside.write(records[10:])
    assert outside.present(records[:10]) == {("", record.step) for record in records[:10]}
    outside.write(records[10:])
    outside.close()
    assert history(server, backend.run_id) == rows_of(records)
    experiment = mlflow.get_experiment_by_name("killed")
    (run,) = mlflow.MlflowClient().search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"


def test_store_in_memory_is_not_sent_away() -> None:
    """Another process would have another store of that name."""
    backend = MlflowBackend(tracking_uri="sqlite:///:memory:", experiment="x")
    assert outsourced(backend) is backend


def test_work_stays_here_when_asked(server: str) -> None:
    """`own_process=False` keeps the work in the training's process."""
    backend = MlflowBackend(experiment="here", own_process=False)
    assert outsourced(backend) is backend


def test_own_run_holds_every_row_and_ends(server: str) -> None:
    """Without an active run the backend makes one of its own, and ends it as finished."""
    records = make_records(300, run_id=new_identity())
    backend = MlflowBackend(experiment="own")
    backend.write(records[:200])
    backend.write(records[200:])
    backend.close()
    assert history(server, backend.run_id) == rows_of(records)
    run = mlflow.get_run(backend.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"gradtrack/max_grad_norm": "1.0"}
    assert "gradtrack" in run.data.tags["mlflow.note.content"]


def test_own_run_of_a_failed_training_is_failed(server: str) -> None:
    """A training that raised leaves a failed run."""
    backend = MlflowBackend(experiment="own")
    backend.write(make_records(1, run_id=new_identity()))
    backend.close(failed=True)
    assert mlflow.get_run(backend.run_id).info.status == "FAILED"


def test_case_05_active_run_goes_on(server: str) -> None:
    """The user's run takes our rows and is running after our close."""
    records = make_records(10)
    with mlflow.start_run() as run:
        backend = MlflowBackend()
        backend.write(records)
        backend.close(failed=True)
        assert mlflow.get_run(run.info.run_id).info.status == "RUNNING"
        mlflow.log_metric("loss", 1.0)
    assert backend.run_id == run.info.run_id
    assert history(server, run.info.run_id) == rows_of(records)


def test_case_06_finished_run_takes_rows(server: str) -> None:
    """Rows that come after the user ended the run arrive all the same."""
    with mlflow.start_run() as run:
        backend = MlflowBackend()
    backend.write(make_records(3))
    backend.close()
    assert len(history(server, run.info.run_id)) == 3


def test_case_23_worker_thread_makes_no_stray_run(server: str, tmp_path: Path) -> None:
    """Written from another thread after the address was changed, rows go to the run of the constructor's thread."""
    experiment_id = mlflow.create_experiment(new_identity())
    with mlflow.start_run(experiment_id=experiment_id) as run:
        backend = MlflowBackend()
        mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/other.db")
        worker = threading.Thread(target=backend.write, args=(make_records(5),))
        worker.start()
        worker.join()
        mlflow.set_tracking_uri(server)
    assert len(history(server, run.info.run_id)) == 5
    assert len(mlflow.MlflowClient().search_runs([experiment_id])) == 1
    assert not (tmp_path / "other.db").exists()


def test_writing_again_changes_nothing(server: str) -> None:
    """The same batch three times is in the history once, NaN included."""
    records = [Record(step=step, time=1.5, metrics={NORM: math.nan, "b": 1.0}) for step in range(5)]
    with mlflow.start_run() as run:
        backend = MlflowBackend()
        for _ in range(3):
            backend.write(records)
    assert len(history(server, run.info.run_id)) == 5
    assert len(history(server, run.info.run_id, "b")) == 5


def test_thousands_of_metrics_in_one_write(server: str) -> None:
    """A batch beyond what one call takes is divided, also within one very wide row and with long names."""
    wide = {f"{'中' * 200}{index}": float(index) for index in range(1500)}
    records = [*make_records(700), Record(step=701, time=1.0, metrics=wide)]
    with mlflow.start_run() as run:
        MlflowBackend().write(records)
    assert len(history(server, run.info.run_id)) == 700
    assert len(mlflow.get_run(run.info.run_id).data.metrics) == 1500 + 5


@pytest.mark.parametrize(
    ("value", "stored"), [(math.inf, 1.7976931348623157e308), (-math.inf, -1.7976931348623157e308)]
)
def test_case_16_infinity_is_the_largest_number(server: str, value: float, stored: float) -> None:
    """MLflow keeps an infinity as the largest double, which its page shows as an infinity."""
    with mlflow.start_run() as run:
        MlflowBackend().write([Record(step=1, time=1.0, metrics={NORM: value})])
    assert history(server, run.info.run_id) == [(1, 1000, stored)]


def test_counting_leaves_nonfinite_values_out(server: str) -> None:
    """For old servers, values that are not finite are counted instead of sent."""
    row = {NORM: math.nan, "b": math.inf, "c": 2.0}
    with mlflow.start_run() as run:
        backend = MlflowBackend(nonfinite="count")
        backend.write([Record(step=1, time=1.0, metrics=row)])
    assert mlflow.get_run(run.info.run_id).data.metrics == {"c": 2.0, "gradtrack/nonfinite": 2.0}
    assert backend.address()["nonfinite"] == "count"


def test_case_17_refused_metric_leaves_its_batch_alone(server: str, caplog: pytest.LogCaptureFixture) -> None:
    """What the server refuses is left out and named; everything else of the batch arrives."""
    records = make_records(20)
    bad = Record(step=-1, time=-5.0, metrics={"before time": 1.0})
    with mlflow.start_run() as run:
        MlflowBackend().write([*records[:10], bad, *records[10:]])
    assert history(server, run.info.run_id) == rows_of(records)
    assert "'before time' is left out" in caplog.text


def test_deleted_run_is_permanent(server: str) -> None:
    """A run that was deleted refuses rows for good, and the error names the way back."""
    with mlflow.start_run() as run:
        backend = MlflowBackend()
    mlflow.delete_run(run.info.run_id)
    with pytest.raises(PermanentBackendError, match=f"mlflow runs restore --run-id {run.info.run_id}"):
        backend.write(make_records(5))


def test_unknown_run_is_permanent(server: str) -> None:
    """A run that never was refuses rows for good."""
    with pytest.raises(PermanentBackendError, match="expected a run that exists"):
        MlflowBackend(run_id="0" * 32).write(make_records(1))


def test_present_compares_steps_and_times(server: str) -> None:
    """Another instance, made from the address, tells what the run holds."""
    records = make_records(20) + make_records(20, source="critic")
    with mlflow.start_run():
        backend = MlflowBackend()
        backend.write([*records[:12], *records[20:25]])
    other_time = Record(step=1, time=1.0, metrics={NORM: 1.0})
    assert MlflowBackend(**backend.address()).present([other_time]) == set()
    found = MlflowBackend(**backend.address()).present(records)
    assert found == {("", step) for step in range(1, 13)} | {("critic", step) for step in range(1, 6)}


@pytest.mark.parametrize("store", ["files", "server"])
@pytest.mark.parametrize("size", [5, pytest.param(1010, marks=pytest.mark.slow)])
def test_row_of_which_a_part_is_there_is_completed(
    store: str, size: int, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill may leave a row half written: in a store of files, or between the calls of a large one."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    address = server if store == "server" else f"file://{tmp_path}/mlruns"
    records = [
        Record(step=step, time=1e9 + step, metrics={f"m{index}": 1.0 * step for index in range(size)})
        for step in (1, 2, 3)
    ]
    records[0] = dataclasses.replace(records[0], run=RunInfo(run_id=uuid.uuid4().hex))
    first = MlflowBackend(tracking_uri=address, experiment=f"halves-{size}")
    whole, half = (
        records[0],
        dataclasses.replace(records[1], metrics=dict(list(records[1].metrics.items())[: size // 2])),
    )
    first.write([whole, half])
    again = MlflowBackend(tracking_uri=address, experiment=f"halves-{size}")
    there = again.present(records)
    assert there == {("", 1)}
    again.write([record for record in records if ("", record.step) not in there])
    for name in ("m0", f"m{size // 2 - 1}", f"m{size // 2}", f"m{size - 1}"):
        points = history(address, again.run_id, name)
        assert [(step, value) for step, _, value in points] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_runs_that_end_at_once_leave_the_settings_as_they_were(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow is told to print no address while a run ends, by a variable that is as it was after many of them."""
    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "false")
    backends = [MlflowBackend(experiment="ends") for _ in range(8)]
    for backend, record in zip(backends, (make_records(1, run_id=new_identity()) for _ in backends), strict=True):
        backend.write(record)
    seen: list[str] = []
    together = threading.Barrier(2)
    end = mlflow.MlflowClient.set_terminated

    def noted(*arguments: Any) -> None:
        seen.append(os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"])
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.2)  # where another one can be here at the same time, it is
        end(*arguments)

    monkeypatch.setattr(mlflow.MlflowClient, "set_terminated", noted)
    threads = [threading.Thread(target=backend.close) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["true"] * 8
    assert os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] == "false"


def test_own_run_is_found_again(server: str) -> None:
    """A replay without the run's number finds the run by the training's identity and does not end it."""
    records = make_records(10, run_id=new_identity())
    first = MlflowBackend(experiment="again")
    address = first.address()
    first.write(records[:4])
    second = MlflowBackend(**address)
    assert second.present(records) == {("", step) for step in range(1, 5)}
    second.write(records[4:])
    second.close()
    assert second.run_id == first.run_id
    assert history(server, first.run_id) == rows_of(records)
    assert mlflow.get_run(first.run_id).info.status == "RUNNING"
    first.close()


def killed(directory: Path, *, run_id: str | None = None, written: int = 6) -> list[Record]:
    """Leave what a training leaves that was killed after some rows had reached a store in its directory."""
    if not (directory / "store.db").exists():
        shutil.copy(empty_store(), directory / "store.db")
    begin = time.time() + 10.0
    records = [dataclasses.replace(one, time=begin + one.step) for one in make_records(10, run_id=new_identity())]
    backend = MlflowBackend(tracking_uri=f"sqlite:///{directory}/store.db", run_id=run_id, experiment="killed")
    if written:
        backend.write(records[:written])
    run = records[0].run
    assert run is not None
    journal = Journal(directory, run, backends=[{"name": "mlflow", "options": backend.address()}])
    for number, record in enumerate(records):
        journal.append(number, record)
    journal.close(10.0)
    return records


def run_in(directory: Path) -> Any:
    """Return the one MLflow run of the store in a directory."""
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{directory}/store.db")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return run


@pytest.mark.parametrize(("failed", "status"), [(None, "KILLED"), (True, "FAILED"), (False, "FINISHED")])
@pytest.mark.parametrize("written", [0, 6])
def test_replay_ends_the_run_that_gradtrack_began(
    tmp_path: Path, failed: bool | None, status: str, written: int
) -> None:
    """Its status is how the training ended, its end the time of the last row, and a second replay changes nothing."""
    records = killed(tmp_path, written=written)
    if failed is not None:
        assert records[0].run is not None
        RunEnd(run_id=records[0].run.run_id, summary=TrainingSummary(), failed=failed).save(tmp_path / RUN_END)
    (found,) = replay(tmp_path)
    assert (found.complete, found.status, found.present) == (True, status, written)
    ended = run_in(tmp_path).info
    assert (ended.status, ended.end_time) == (status, round(records[-1].time * 1000))
    assert history(f"sqlite:///{tmp_path}/store.db", ended.run_id) == rows_of(records)
    (tmp_path / RUN_END).unlink(missing_ok=True)
    (again,) = replay(tmp_path)
    assert (again.complete, again.status, run_in(tmp_path).info.status) == (True, "", status)


def test_replay_leaves_a_run_of_the_user_open(tmp_path: Path) -> None:
    """A training that was killed ends no run that it has not begun."""
    shutil.copy(empty_store(), tmp_path / "store.db")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/store.db")
    killed(tmp_path, run_id=client.create_run("0").info.run_id)
    (found,) = replay(tmp_path)
    assert (found.complete, found.delivered, found.status) == (True, 4, "")
    assert run_in(tmp_path).info.status == "RUNNING"


def test_replay_that_fails_leaves_the_run_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that it has begun itself: the next replay brings the rest, and ends it."""
    killed(tmp_path, written=0)
    monkeypatch.setattr(replaying, "_DELAYS_SECONDS", ())
    with monkeypatch.context() as patch:
        log = Store.log

        def once(store: Store, run_id: str, metrics: list[Any]) -> None:
            log(store, run_id, metrics[:5])
            raise BackendError("the server is gone")

        patch.setattr(Store, "log", once)
        (found,) = replay(tmp_path)
    assert (found.complete, run_in(tmp_path).info.status) == (False, "RUNNING")
    (found,) = replay(tmp_path)
    assert (found.complete, run_in(tmp_path).info.status) == (True, "KILLED")


def test_files_are_artifacts_at_close(server: str, tmp_path: Path) -> None:
    """The files that records name and those that the run has left are in the run after close, and no others."""
    (tmp_path / "report.html").write_text("<p>report</p>")
    files = (str(tmp_path / "report.html"), str(tmp_path / "gone.png"))
    with mlflow.start_run() as run:
        backend = MlflowBackend()
        info = RunInfo(run_id="x", run_dir=str(tmp_path / "run"))
        backend.write([Record(step=1, time=1.0, metrics={"a": 1.0}, files=files, run=info)])
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "training_curves.png").write_bytes(b"picture")
        (tmp_path / "run" / "passport.png").write_bytes(b"the user's own")
        note_files(tmp_path / "run", "x", [tmp_path / "run" / "training_curves.png"])
        backend.close()
    found = mlflow.MlflowClient().list_artifacts(run.info.run_id, "gradtrack")
    assert [entry.path for entry in found] == ["gradtrack/report.html", "gradtrack/training_curves.png"]


@given(st.text(min_size=1, max_size=300))
@example("a[0]")
@example("../x")
@example("a//b")
@example(".")
@example("a" * 251)
@example("a b ")
def test_case_18_every_name_becomes_valid(name: str) -> None:
    """Whatever a metric is called, MLflow takes the name that stands for it, and mapping it again changes nothing."""
    from mlflow.utils.validation import _validate_metric_name

    mapped = metric_name(name)
    _validate_metric_name(mapped)
    assert 1 <= len(mapped) <= 250
    assert metric_name(name) == mapped
    if re.fullmatch(r"(?=.{,250}$)[a-z]+(/[a-z]+)*", name):
        assert mapped == name


@given(st.lists(st.text(alphabet="a/.[]| _-gt0", min_size=1, max_size=8), unique=True, max_size=50))
def test_case_18_names_never_merge(names: list[str]) -> None:
    """Two metrics have two names, also where one of them looks like the mapping of the other."""
    everything = {*names, *(metric_name(name) for name in names)}
    assert len({metric_name(name) for name in everything}) == len(everything)


def test_case_18_original_name_is_in_a_tag(server: str) -> None:
    """A name that MLflow refuses is kept in full in a tag of the run."""
    with mlflow.start_run() as run:
        MlflowBackend().write([Record(step=1, time=1.0, metrics={"a[0]|b": 1.0})])
    ((mapped, _),) = mlflow.get_run(run.info.run_id).data.metrics.items()
    tags = mlflow.get_run(run.info.run_id).data.tags
    assert tags[f"gradtrack.name.{mapped[-12:]}"] == "a[0]|b"


def test_case_24_no_error_shows_the_password(caplog: pytest.LogCaptureFixture) -> None:
    """Neither an error, its causes, the address nor a log line holds the credentials of the tracking URI."""
    uri = f"http://user:s3cr3t@127.0.0.1:{free_port()}/base?token=t0psecret"
    backend = MlflowBackend(tracking_uri=uri, experiment="x")
    with pytest.raises(BackendError) as caught:
        backend.write(make_records(1))
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    everything = f"{caught.value!r} {caught.value} {backend.address()} {backend!r} {caplog.text}"
    assert "s3cr3t" not in everything
    assert "t0psecret" not in everything


def test_case_24_end_of_a_run_prints_no_password(server: str, capfd: pytest.CaptureFixture[str]) -> None:
    """MLflow's own line on where the run is would show the credentials of the tracking URI."""
    before = dict(os.environ)
    backend = MlflowBackend(tracking_uri=server.replace("//", "//user:s3cr3t@"), experiment="printed")
    backend.write(make_records(1, run_id=new_identity()))
    backend.close()
    assert mlflow.get_run(backend.run_id).info.status == "FINISHED"
    assert "s3cr3t" not in "".join(capfd.readouterr())
    assert dict(os.environ) == before


def test_case_24_store_errors_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of MLflow's client that quotes the address is quoted without the password."""
    backend = MlflowBackend(tracking_uri="sqlite:///none.db", run_id="x")

    class Client:
        def search_experiments(self, **_: object) -> list[object]:
            return []

        def log_batch(self, *_: object, **__: object) -> None:
            raise RuntimeError("API request to http://user:s3cr3t@host/api failed")

        get_run = log_batch

    monkeypatch.setattr(mlflow, "MlflowClient", lambda **_: Client())
    with pytest.raises(BackendError, match=r"http://\*\*\*@host/api"):
        backend.write(make_records(1))


def test_relative_store_survives_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sqlite store is the one that the address meant where the backend was made."""
    shutil.copy(empty_store(), tmp_path / "store.db")
    monkeypatch.chdir(tmp_path)
    backend = MlflowBackend(tracking_uri="sqlite:///store.db", experiment="x")
    monkeypatch.chdir("/")
    backend.write(make_records(2))
    assert len(history(f"sqlite:///{tmp_path}/store.db", backend.run_id)) == 2


def test_closed_backend_refuses_records(server: str) -> None:
    """A second close does nothing, and writing after it is an error."""
    backend = MlflowBackend()
    backend.close()
    backend.close()
    with pytest.raises(ClosedError):
        backend.write(make_records(1))


def test_options_are_checked() -> None:
    """An option that cannot mean anything is refused."""
    with pytest.raises(UsageError, match="expected 'keep' or 'count'"):
        MlflowBackend(nonfinite="drop")  # type: ignore[arg-type]


def test_probe_names_the_run_without_making_one(server: str) -> None:
    """The doctor learns where rows would go, and nothing is made."""
    experiment_id = mlflow.create_experiment(new_identity())
    with mlflow.start_run(experiment_id=experiment_id) as run:
        assert MlflowBackend.probe() == f"run {run.info.run_id} (running) at {server}"
    assert MlflowBackend.probe(experiment="nowhere") == f"a new run at {server}"
    assert mlflow.get_experiment_by_name("nowhere") is None


def test_saved_view_draws_the_panels(server: str) -> None:
    """The panels are charts of a view of the experiment, under one fixed identity, with the stars filled in."""
    experiment_id = mlflow.create_experiment(new_identity())
    with mlflow.start_run(experiment_id=experiment_id):
        backend = MlflowBackend(saved_view=True)
        backend.write(make_records(2, panels=CORE_PANELS))
        backend.write([Record(step=3, time=3.0, metrics={f"{NORM}/W_out": 1.0})])
    tags = mlflow.get_experiment(experiment_id).tags
    ((key, value),) = [(key, value) for key, value in tags.items() if key.startswith("mlflow.sharedViewState.")]
    assert key == saved_view([], {}, 0)[0]
    state = json.loads(json.loads(value)["state"])
    cards = {card["displayName"]: card for card in state["compareRunCharts"]}
    assert cards["Gradient norm of each group"]["selectedMetricKeys"] == [f"{NORM}/W_out", f"{NORM}/W_rec"]
    assert cards["Gradient norm before and after clipping"]["scaleType"] == "log"
    assert {card["metricSectionId"] for card in cards.values()} == {state["compareRunSections"][0]["uuid"]}


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "a\nb'\"\\", "🔥\u202egnp", "n" * 500, "dots.and spaces"]
)
def test_panels_with_hostile_names_draw_their_metrics(server: str, name: str) -> None:
    """Whatever MLflow made of a name, the view's charts have the metrics of the run by the names that it gave them."""
    experiment_id = mlflow.create_experiment(new_identity())
    panel = Panel(title=name, section="rnn", metrics=(f"rnn/{name}", f"gates/{name}/*"), kind="multi-line")
    metrics = {f"rnn/{name}": 1.0, f"gates/{name}/in": 2.0}
    with mlflow.start_run(experiment_id=experiment_id) as run:
        MlflowBackend(saved_view=True).write([Record(step=1, time=1.0, metrics=metrics, panels=(panel,))])
    tags = mlflow.get_experiment(experiment_id).tags
    (value,) = [value for key, value in tags.items() if key.startswith("mlflow.sharedViewState.")]
    cards = json.loads(json.loads(value)["state"])["compareRunCharts"]
    (card,) = [card for card in cards if card["displayName"] == name]
    kept = mlflow.get_run(run.info.run_id).data.metrics
    assert {kept[key] for key in card["selectedMetricKeys"]} == {1.0, 2.0}


def test_saved_view_failure_costs_only_the_view(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the view cannot be written the rows arrive all the same."""
    with mlflow.start_run() as run:
        backend = MlflowBackend(saved_view=True)
        monkeypatch.setattr(mlflow.MlflowClient, "set_experiment_tag", lambda *_: 1 / 0)
        backend.write(make_records(2, panels=CORE_PANELS))
    assert len(history(server, run.info.run_id)) == 2


def test_case_11_server_that_is_down_fails_at_once() -> None:
    """Nothing is made and nothing blocks while no server listens; the constructor does not call at all."""
    backend = MlflowBackend(tracking_uri=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(BackendError, match="does not answer"):
        backend.write(make_records(1))
    assert backend.run_id is None
    backend.close()


@pytest.mark.slow
def test_case_11_rows_arrive_after_the_server_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that dies and comes back has each row once."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    shutil.copy(empty_store(), tmp_path / "store.db")
    port, records = free_port(), make_records(30, run_id=new_identity())
    with served(tmp_path / "store.db", port) as address:
        backend = MlflowBackend(tracking_uri=address, experiment="outage")
        backend.write(records[:10])
    with pytest.raises(BackendError, match="does not answer"):
        backend.write(records[10:20])
    with served(tmp_path / "store.db", port) as address:
        backend.write(records[10:20])
        backend.write(records[20:])
        backend.close()
        assert history(address, backend.run_id) == rows_of(records)


def test_case_12_silent_server_is_given_up_in_time() -> None:
    """A server that accepts and never answers costs one time limit, not the minutes of MLflow's client."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
        backend = MlflowBackend(tracking_uri=uri, run_id="x", timeout_seconds=0.2)
        with pytest.raises(BackendError, match=r"does not answer \(ReadTimeout\)"):
            backend.write(make_records(1))


class FaultyProxy(ThreadingHTTPServer):
    """Stands before a server and answers the first calls of log-batch with a fault, before or after passing them on."""

    def __init__(self, target: str, faults: list[int], *, passing: bool) -> None:
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.target, self.faults, self.passing = target, faults, passing
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


class _ProxyHandler(BaseHTTPRequestHandler):
    server: FaultyProxy

    def _answer(self) -> None:
        import requests

        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.faults.pop(0) if "log-batch" in self.path and self.server.faults else None
        status, content = fault, b"{}"
        if fault is None or self.server.passing:
            headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            found = requests.request(
                self.command, self.server.target + self.path, data=body, headers=headers, timeout=30
            )
            status, content = fault or found.status_code, found.content
        self.send_response(status or 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_POST = do_HEAD = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("passing", [False, True])
def test_case_13_faulty_answers_deliver_once(server: str, passing: bool) -> None:
    """Answers 500, 503 and 429, with the rows taken or not, end with every row there once."""
    run_id = mlflow.MlflowClient().create_run("0").info.run_id
    records = make_records(10)
    proxy = FaultyProxy(server, [500, 503, 429], passing=passing)
    try:
        backend = MlflowBackend(run_id=run_id, tracking_uri=f"http://127.0.0.1:{proxy.server_port}")
        for _ in range(3):
            with pytest.raises(BackendError):
                backend.write(records)
        backend.write(records)
    finally:
        proxy.shutdown()
        proxy.server_close()
    assert history(server, run_id) == rows_of(records)


def test_case_14_full_disk_is_contained(tmp_path: Path) -> None:
    """A store that cannot grow refuses a batch as a whole, and takes it when there is room."""
    shutil.copy(empty_store(), tmp_path / "store.db")
    program = """
        import resource, signal, sys
        from gradtrack.backends.mlflow import MlflowBackend
        from gradtrack.errors import BackendError
        from tests.backends.rows import make_records
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        uri = "sqlite:///" + sys.argv[1]
        backend, records = MlflowBackend(tracking_uri=uri, experiment="full"), make_records(2000)
        backend.write(records[:10])
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            backend.write(records[10:])
        except BackendError:
            print("refused")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        backend.write(records[10:])
        print(backend.run_id)
    """
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "store.db")]
    result = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    refused, run_id = result.stdout.split()
    assert refused == "refused"
    assert history(f"sqlite:///{tmp_path}/store.db", run_id) == rows_of(make_records(2000))


def test_lost_answer_to_the_creation_makes_no_second_run(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was made although the answer was lost is found again, and is ours to end."""
    backend = MlflowBackend(experiment="lost answer")
    create = mlflow.MlflowClient.create_run

    def losing(*arguments: Any, **keywords: Any) -> None:
        create(*arguments, **keywords)
        raise ConnectionError("the answer was lost")

    records = make_records(3, run_id=new_identity())
    monkeypatch.setattr(mlflow.MlflowClient, "create_run", losing)
    with pytest.raises(BackendError, match="the answer was lost"):
        backend.write(records)
    backend.write(records)
    backend.close()
    assert mlflow.get_run(backend.run_id).info.status == "FINISHED"
    assert history(server, backend.run_id) == rows_of(records)


def test_run_identity_is_no_query(server: str) -> None:
    """A hostile identity cannot change the search for the run."""
    backend = MlflowBackend(experiment="quotes")
    backend.write([Record(step=1, time=1.0, metrics={"a": 1.0}, run=RunInfo(run_id="x' or '1' = '1"))])
    assert len(history(server, backend.run_id, "a")) == 1


OPENING = """
import sys, mlflow
from gradtrack.backends.mlflow.store import Store
Store(mlflow, sys.argv[1], run_id=None, timeout_seconds=5.0).client
"""


@pytest.mark.slow
def test_trainings_that_begin_together_make_one_store(tmp_path: Path) -> None:
    """Several processes that meet at a new sqlite file do not lay out its tables on top of each other."""
    command = [sys.executable, "-c", OPENING, f"sqlite:///{tmp_path}/new.db"]
    started = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ended = [(process.communicate(timeout=120)[1], process.returncode) for process in started]
    assert [code for _, code in ended] == [0, 0, 0], ended


@pytest.mark.parametrize("body", [b"<html>sign in</html>", b"{}", b"", b"[]", b"\xff"])
@pytest.mark.parametrize("options", [{"run_id": "abc"}, {"experiment": "x"}, {}])
def test_case_13_gateway_that_answers_anything_takes_no_row(body: bytes, options: dict[str, Any]) -> None:
    """What says 200 to everything is no MLflow server, and no row counts as taken by it."""

    class Gateway(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        backend = MlflowBackend(tracking_uri=f"http://127.0.0.1:{server.server_port}", **options)
        for _ in range(2):
            with pytest.raises(BackendError, match=r"not with a run|not in a valid JSON"):
                backend.write(make_records(1))
        server.shutdown()


def test_history_is_fetched_once_however_many_parts_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay of a million rows asks in thousands of parts; only after a write that failed is it asked for again.

    It is the histories of a row's first and last metric that tell.
    """
    shutil.copy(empty_store(), tmp_path / "store.db")
    records = make_records(40)
    backend = MlflowBackend(tracking_uri=f"sqlite:///{tmp_path}/store.db")
    backend.write(records[:20])
    fetched: list[str] = []
    again = MlflowBackend(**backend.address())
    fetch = mlflow.MlflowClient.get_metric_history

    def counted(client: Any, run_id: str, name: str) -> Any:
        fetched.append(name)
        return fetch(client, run_id, name)

    monkeypatch.setattr(mlflow.MlflowClient, "get_metric_history", counted)
    for start in range(0, 40, 5):
        part = records[start : start + 5]
        there = again.present(part) or set()
        assert there == ({("", record.step) for record in part} if start < 20 else set())
        again.write([record for record in part if (record.source, record.step) not in there])
    assert len(fetched) == 2
    assert again.present(records) == {("", record.step) for record in records}
    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "log_batch", None)
        with pytest.raises(BackendError):
            again.write(records[:1])
    assert again.present(records) == {("", record.step) for record in records}
    assert len(fetched) == 4
