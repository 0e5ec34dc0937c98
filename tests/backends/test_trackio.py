"""Trackio's own store on this machine has every row once: in the user's run, in one of its own, after a kill."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradtrack import GradientManager
from gradtrack.delivery.journal.reading import find_journals
from gradtrack.delivery.replay import replay
from gradtrack.errors import BackendError, UsageError
from gradtrack.records import Record
from tests.backends.conftest import free_port
from tests.backends.rows import make_records
from tests.backends.stores import moved_trackio
from tests.processes import ROOT
from tests.training import batch_loss, optimizer_of, small_model, train

trackio: Any = pytest.importorskip("trackio", reason='it is not installed: pip install "gradtrack[trackio]"')

from gradtrack.backends.trackio import TrackioBackend  # noqa: E402

Rows = dict[str, list[tuple[int, float]]]
EVERY_STEP: dict[str, Any] = {"grad_log_every_n_steps": 1, "engine": "torch", "save_gradient_plots": False}


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a store in the directory of the test, and no open run."""
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_STORAGE_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with moved_trackio(tmp_path / "trackio"):
        token = trackio.context_vars.current_run.set(None)
        yield tmp_path / "trackio"
        trackio.context_vars.current_run.reset(token)


def begun(name: str = "mine") -> Any:
    """Begin a run of the user's."""
    return trackio.init(project="theirs", name=name, embed=False, auto_log_cpu=False, auto_log_gpu=False)


def rows_of(project: str) -> dict[str, Rows]:
    """Return for each run of a project (step, value) by metric, as Trackio reads them."""
    store = trackio.sqlite_storage.SQLiteStorage
    found: dict[str, Rows] = {}
    for record in store.get_run_records(project):
        series = found.setdefault(record["name"], {})
        for row in store.get_logs(project, run_id=record["id"]):
            for name, value in row.items():
                if name not in ("step", "timestamp"):
                    series.setdefault(name, []).append((row["step"], value))
    return found


def journaled(run_dir: Path | str) -> list[Record]:
    """Return the rows that the journals of a run hold."""
    return [record for journal in find_journals(Path(run_dir)) for _, record in journal.rows()]


@pytest.mark.parametrize("theirs", ["v1", 3, None, ["ours"], {"trainings": "all"}, {"trainings": [["one"]]}])
def test_runs_with_settings_of_the_same_name_are_left_alone(theirs: Any) -> None:
    """What other runs of the project have under `gradtrack` is none of ours: the rows go to a run of their own."""
    store = trackio.sqlite_storage.SQLiteStorage
    store.bulk_log(project="gradtrack", run="theirs", metrics_list=[{"loss": 1.0}], config={"gradtrack": theirs})
    records = make_records(2)
    backend = TrackioBackend()
    backend.write(records)
    assert backend.present(records) == {(record.source, record.step) for record in records}
    assert len(rows_of("gradtrack")) == 2


def test_a_store_that_cannot_be_read_is_a_fault_of_the_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its rows wait, as with any other fault."""

    def fail(project: str) -> None:
        raise OSError("disk I/O error")

    backend = TrackioBackend()
    monkeypatch.setattr(trackio.sqlite_storage.SQLiteStorage, "get_all_run_configs", fail)
    with pytest.raises(BackendError, match="OSError: disk I/O error"):
        backend.write(make_records(1))


def test_a_run_that_is_open_is_joined_and_keeps_its_own_count() -> None:
    """Our rows join the user's run, and the steps that Trackio counts for the user are those without us."""
    run = begun()
    with GradientManager(backends=["trackio"], **EVERY_STEP) as manager:
        model = small_model()
        optimizer = optimizer_of(model)
        for step in range(1, 6):
            optimizer.zero_grad()
            loss = batch_loss(model, step)
            manager.step(model, optimizer, loss)
            optimizer.step()
            trackio.log({"loss": loss.item()})
    run.finish()
    (series,) = rows_of("theirs").values()
    assert [step for step, _ in series["loss"]] == [0, 1, 2, 3, 4]
    assert [step for step, _ in series["train/grad_norm"]] == [1, 2, 3, 4, 5]
    norms = [record.metrics["train/grad_norm"] for record in journaled(manager.status()["run_dir"])]
    assert [value for _, value in series["train/grad_norm"]] == norms


def test_a_run_that_begins_before_the_first_row_is_joined() -> None:
    """A manager that is made before the run joins it all the same; one that has begun stays where it is."""
    manager = GradientManager(backends=["trackio"], **EVERY_STEP)
    run = begun()
    train(manager, 2)
    manager.close()
    run.finish()
    assert "train/grad_norm" in rows_of("theirs")["mine"]
    assert rows_of("gradtrack") == {}


def test_without_a_run_there_is_one_of_its_own() -> None:
    """It lies in the project that is named, is called like the training, and has its settings."""
    with GradientManager(backends=[{"name": "trackio", "project": "exp"}], max_grad_norm=0.5, **EVERY_STEP) as manager:
        train(manager, 3)
        run_id = manager.status()["run_id"]
    ((name, series),) = rows_of("exp").items()
    assert (name, [step for step, _ in series["train/grad_norm"]]) == (run_id, [1, 2, 3])
    (config,) = trackio.sqlite_storage.SQLiteStorage.get_all_run_configs("exp").values()
    assert (config["gradtrack"]["trainings"], config["gradtrack"]["max_grad_norm"]) == ([run_id], 0.5)


def test_no_thread_comes_with_it() -> None:
    """A run of its own needs none of Trackio's threads: neither its sender nor its monitor of the processor."""
    import threading

    before = set(threading.enumerate())
    backend = TrackioBackend(project="quiet")
    backend.write(make_records(3))
    assert set(threading.enumerate()) == before


def test_a_training_that_is_resumed_goes_on_in_its_run(tmp_path: Path) -> None:
    """So does one that was resumed twice; a training of its own beside it has another run."""
    states: list[bytes] = []
    for steps in (3, 2, 2):
        manager = GradientManager(backends=["trackio"], run_dir=tmp_path / "run", **EVERY_STEP)
        model = small_model()
        optimizer = optimizer_of(model)
        manager.attach(model, optimizer)
        if states:
            manager.load_state_dict(pickle.loads(states[-1]))
        for step in range(steps):
            optimizer.zero_grad()
            manager.step(model, optimizer, batch_loss(model, step))
            optimizer.step()
        states.append(pickle.dumps(manager.state_dict()))
        manager.close()
    with GradientManager(backends=["trackio"], run_dir=tmp_path / "other", **EVERY_STEP) as manager:
        train(manager, 1)
    found = [[step for step, _ in series["train/grad_norm"]] for series in rows_of("gradtrack").values()]
    assert sorted(found) == [[1], [1, 2, 3, 4, 5, 6, 7]]
    for done in replay(tmp_path / "run"):
        assert (done.complete, done.delivered) == (True, 0), done


def test_a_replay_delivers_each_row_once(tmp_path: Path) -> None:
    """Rows that were never sent arrive, however often it is called, also where the offsets of a run were lost."""
    with GradientManager(backends=["json"], run_dir=tmp_path / "run", **EVERY_STEP) as manager:
        train(manager, 20, change=lambda step, loss: loss * (math.nan if step == 7 else 1.0))
    for delivered in (20, 0):
        (done,) = replay(tmp_path / "run", to="trackio", options={"project": "later"})
        assert (done.complete, done.delivered, done.present) == (True, delivered, 20 - delivered), done
        for path in (tmp_path / "run").glob("*.acknowledged.json"):
            path.unlink()
    (series,) = rows_of("later").values()
    wanted: Rows = {}
    for record in journaled(tmp_path / "run"):
        for name, value in record.metrics.items():
            wanted.setdefault(name, []).append((record.step, value))
    assert repr(dict(sorted(series.items()))) == repr(dict(sorted(wanted.items())))


def test_a_replay_finds_the_users_run_again(tmp_path: Path) -> None:
    """The journal says which run it was, and that run gets what it lacks."""
    run = begun()
    with GradientManager(backends=["trackio"], run_dir=tmp_path / "run", **EVERY_STEP) as manager:
        train(manager, 4)
    run.finish()
    trackio.context_vars.current_run.set(None)
    store = trackio.sqlite_storage.SQLiteStorage
    with store._get_connection(store.get_project_db_path("theirs")) as connection:
        connection.execute("DELETE FROM metrics WHERE step > 2")
    for delivered in (2, 0):
        (done,) = replay(tmp_path / "run")
        assert (done.complete, done.delivered) == (True, delivered), done
    assert [step for step, _ in rows_of("theirs")["mine"]["train/grad_norm"]] == [1, 2, 3, 4]


def test_a_store_in_another_directory_gets_no_second_copy(tmp_path: Path) -> None:
    """A replay in a process whose Trackio lies elsewhere says how to reach the store of the run."""
    with GradientManager(backends=["trackio"], run_dir=tmp_path / "run", **EVERY_STEP) as manager:
        train(manager, 2)
    with moved_trackio(tmp_path / "elsewhere"):
        (done,) = replay(tmp_path / "run", allowed=[tmp_path])
        assert f"TRACKIO_DIR={tmp_path / 'trackio'}" in (done.fault or ""), done
        (done,) = replay(tmp_path / "run")
        assert "--allow" in (done.fault or ""), done
    assert not (tmp_path / "elsewhere").exists()


KILLED = """
    import os, signal, sys
    from gradtrack import GradientManager
    from tests.training import batch_loss, optimizer_of, small_model

    model = small_model()
    optimizer = optimizer_of(model)
    manager = GradientManager(
        backends=["trackio"], run_dir="run", grad_log_every_n_steps=1, engine="torch", save_gradient_plots=False
    )
    for step in range(1, 41):
        optimizer.zero_grad()
        manager.step(model, optimizer, batch_loss(model, step))
        optimizer.step()
        if step == 20:
            manager.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_case_07_a_killed_training_is_completed(tmp_path: Path, store: Path) -> None:
    """What a kill left behind arrives by a replay: every step once."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRACKIO_DIR": str(store)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED)], env=environment, check=False)
    assert done.returncode == -9
    (result,) = replay(tmp_path / "run")
    assert (result.complete, result.rows) == (True, 40), result
    assert result.present >= 20
    (series,) = rows_of("gradtrack").values()
    assert [step for step, _ in series["train/grad_norm"]] == list(range(1, 41))


def test_a_store_that_cannot_be_written_harms_no_training(tmp_path: Path, store: Path) -> None:
    """Steps go on, the fault is told, and the rows wait for a replay."""
    store.write_text("in the way of a directory")
    settings: dict[str, Any] = {**EVERY_STEP, "close_timeout_seconds": 0.3, "run_dir": tmp_path / "run"}
    manager = GradientManager(backends=["trackio"], **settings)
    assert len(train(manager, 5)) == 5
    manager.close()
    status = manager.status()["backends"]["trackio"]
    assert (status["acknowledged"], status["pending"]) == (0, 5)
    assert "trackio: " in status["why"]
    store.unlink()
    (done,) = replay(tmp_path / "run")
    assert (done.complete, done.delivered) == (True, 5), done


def test_a_batch_is_taken_wholly_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault within a batch leaves nothing of it behind, and the same batch again is whole."""
    backend = TrackioBackend(project="atomic")
    storage = trackio.sqlite_storage.SQLiteStorage
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_insert_trace_rows", lambda *_: 1 / 0)
        with pytest.raises(BackendError, match="ZeroDivisionError"):
            backend.write(make_records(5))
    assert backend.present(make_records(5)) == set()
    backend.write(make_records(5))
    assert backend.present(make_records(6)) == {("", step) for step in range(1, 6)}


SERVER = """
    import sys, time, trackio

    found = trackio.show(open_browser=False, block_thread=False, server_port=int(sys.argv[1]), share=False)
    print("URL", found[3], flush=True)
    time.sleep(300)
"""
CLIENT = """
    import trackio
    from gradtrack.backends.trackio import TrackioBackend
    from tests.backends.rows import make_records

    trackio.init(project="sent", name="r", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    backend = TrackioBackend()
    backend.write(make_records(30))
    print(backend.present(make_records(1)), backend.address())
    backend.close()
    trackio.finish()
"""


def test_a_run_that_is_sent_to_a_server_gets_its_rows(tmp_path: Path, store: Path) -> None:
    """With a server of Trackio on this machine, which speaks HTTP, every row arrives; its address is not noted."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRACKIO_DIR": str(store)}
    command = [sys.executable, "-c", textwrap.dedent(SERVER), str(free_port())]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next(line.split()[1] for line in server.stdout if line.startswith("URL"))
        environment |= {"TRACKIO_DIR": str(tmp_path / "client"), "TRACKIO_SERVER_URL": url}
        client = [sys.executable, "-c", textwrap.dedent(CLIENT)]
        done = subprocess.run(client, env=environment, capture_output=True, text=True, check=False, timeout=120)
        server.kill()
    assert "None {}" in done.stdout, done.stderr
    assert sorted(step for step, _ in rows_of("sent")["r"]["train/grad_norm"]) == list(range(1, 31))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"run": 3}, r"Pass what trackio.init\(\) returned"),
        ({"run_id": "x"}, "expected the run_name as well"),
        ({"directory": "/somewhere"}, "Set TRACKIO_DIR=/somewhere"),
        ({"projekt": "x"}, "Did you mean 'project'"),
    ],
)
def test_options_that_cannot_mean_anything_are_refused(options: dict[str, Any], text: str) -> None:
    """The error comes when the manager is made, and says what to do."""
    with pytest.raises(UsageError, match=text):
        GradientManager(backends=[{"name": "trackio", **options}])


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("TRACKIO_SPACE_ID", "me/space", r"Call trackio.init\(\) before"),
        ("TRACKIO_SERVER_URL", "http://127.0.0.1:1", r"Call trackio.init\(\) before"),
        ("TRACKIO_STORAGE_MODE", "jsonl", "TRACKIO_STORAGE_MODE=sqlite"),
    ],
)
def test_settings_under_which_a_run_of_its_own_would_be_elsewhere_are_refused(
    name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows do not go to this machine where Trackio was told to send them away."""
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=text):
        TrackioBackend()


def test_a_store_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version without identities could not keep a row once, and is not written to."""
    monkeypatch.setattr(trackio.sqlite_storage.SQLiteStorage, "bulk_log", lambda project, run: None)
    with pytest.raises(UsageError, match=r'pip install "gradtrack\[trackio\]"'):
        TrackioBackend()


def test_the_doctor_names_the_place_and_makes_nothing(store: Path) -> None:
    """It tells the project and the directory, or the run that is open."""
    assert TrackioBackend.probe(project="p") == f"a run in project p in {store}"
    assert not store.exists()
    run = begun()
    assert TrackioBackend.probe() == "run mine of project theirs, which is open"
    run.finish()
