"""Faults of an MLflow server around whole trainings."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

mlflow: Any = pytest.importorskip("mlflow")

from tests.backends.conftest import free_port, served  # noqa: E402
from tests.backends.stores import empty_store  # noqa: E402
from tests.backends.test_mlflow import FaultyProxy  # noqa: E402
from tests.faults.programs import NORM, held, journaled, once, replay, run, start  # noqa: E402

STEPS = range(1, 121)
slow = pytest.mark.slow
TRAIN = """
    uri = {uri!r}
    options = {{"name": "mlflow", "tracking_uri": uri, "experiment": "faults", "timeout_seconds": 1.0}}
    loop = Loop(directory / "run", [options], close_timeout_seconds={close})
    loop.run(60)
    {middle}
    loop.run(60)
    loop.manager.close()
    print(json.dumps(loop.manager.status()["backends"]["mlflow"]), flush=True)
"""


def on_server(address: str) -> Counter[int]:
    """Return how often the only run of the experiment has each step."""
    client = mlflow.MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("faults")
    (found,) = client.search_runs([experiment.experiment_id])
    return Counter(point.step for point in client.get_metric_history(found.info.run_id, NORM))


def status_of(output: str) -> dict[str, Any]:
    """Return the status that a program printed last."""
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.slow
def test_case_11_server_that_is_down_until_the_replay(tmp_path: Path) -> None:
    """A training whose server is down ends in time and names the replay, which brings each row once, however often."""
    shutil.copy(empty_store(), tmp_path / "store.db")
    port = free_port()
    done = run(TRAIN.format(uri=f"http://127.0.0.1:{port}", close=1.0, middle=""), tmp_path, "mlflow")
    assert done.returncode == 0, done.stderr
    assert status_of(done.stdout)["acknowledged"] == 0
    assert f"gradtrack replay {tmp_path}/run" in done.stderr
    assert journaled(tmp_path) == list(STEPS)
    with served(tmp_path / "store.db", port) as address:
        for _ in range(2):
            replay(tmp_path)
            assert on_server(address) == once(STEPS)


@slow
def test_case_11_server_that_dies_and_comes_back(tmp_path: Path) -> None:
    """A server that is killed in the middle of a training and started again has each row once, without a replay."""
    shutil.copy(empty_store(), tmp_path / "store.db")
    port = free_port()
    middle = 'await_delivery(loop); print("ready", flush=True); sys.stdin.readline()'
    program = TRAIN.format(uri=f"http://127.0.0.1:{port}", close=60.0, middle=middle).replace(
        "loop.manager.close()", 'print("more", flush=True); sys.stdin.readline(); loop.manager.close()'
    )
    started = start(program, tmp_path, "mlflow")
    assert started.stdin is not None
    assert started.stdout is not None
    with served(tmp_path / "store.db", port):
        assert started.stdout.readline() == "ready\n", started.communicate()
    started.stdin.write("\n")
    started.stdin.flush()
    assert started.stdout.readline() == "more\n"
    with served(tmp_path / "store.db", port) as address:
        out, err = started.communicate("\n", timeout=300)
        assert started.returncode == 0, err
        assert status_of(out)["acknowledged"] == 120
        assert on_server(address) == once(STEPS)


def test_case_12_server_that_never_answers(tmp_path: Path) -> None:
    """A server that accepts and never answers keeps neither the loop nor the close, and nothing is claimed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
        done = run(TRAIN.format(uri=uri, close=2.0, middle=""), tmp_path, "mlflow")
    assert done.returncode == 0, done.stderr
    assert status_of(done.stdout)["acknowledged"] == 0
    assert f"gradtrack replay {tmp_path}/run" in done.stderr
    assert journaled(tmp_path) == list(STEPS)


class Locked(BaseHTTPRequestHandler):
    """Wants credentials for everything but its health, as a server with basic authentication does."""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200 if self.path == "/health" else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_PATCH = do_HEAD = _answer

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_server_that_wants_credentials_is_not_waited_for(tmp_path: Path) -> None:
    """The end of the training names the variables for them at once, and the rows wait for a replay."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Locked) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = run(
            TRAIN.format(uri=f"http://127.0.0.1:{server.server_port}", close=100.0, middle=""), tmp_path, "mlflow"
        )
        server.shutdown()
    status = status_of(done.stdout)
    assert (status["acknowledged"], status["refused"], status["pending"]) == (0, 120, 0)
    assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in done.stderr
    assert f"gradtrack replay {tmp_path}/run" in done.stderr
    assert journaled(tmp_path) == list(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("passing", [False, pytest.param(True, marks=slow)])
def test_case_13_server_that_answers_with_faults(mlflow_server: str, tmp_path: Path, passing: bool) -> None:
    """Answers 500, 503 and 429, with the rows taken or not, cost a training no row and double none."""
    proxy = FaultyProxy(mlflow_server, [500, 503, 429, 500], passing=passing)
    experiment = f"faults {passing}"
    program = TRAIN.format(uri=f"http://127.0.0.1:{proxy.server_port}", close=60.0, middle="await_delivery(loop)")
    try:
        done = run(program.replace('"faults"', repr(experiment)), tmp_path, "mlflow")
    finally:
        proxy.shutdown()
        proxy.server_close()
    assert done.returncode == 0, done.stderr
    assert status_of(done.stdout)["acknowledged"] == 120
    assert proxy.faults == []
    client = mlflow.MlflowClient(tracking_uri=mlflow_server)
    (found,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    assert Counter(point.step for point in client.get_metric_history(found.info.run_id, NORM)) == once(STEPS)


@pytest.mark.slow
def test_case_23_training_stays_with_the_run_it_began_in(tmp_path: Path) -> None:
    """The user's run takes every row, whatever becomes of the tracking address, and no other run appears."""
    shutil.copy(empty_store(), tmp_path / "store.db")
    program = """
        import mlflow
        mlflow.set_tracking_uri(f"sqlite:///{directory}/store.db")
        with mlflow.start_run():
            loop = Loop(directory / "run", ["mlflow"], close_timeout_seconds=60.0)
            loop.run(60)
            mlflow.set_tracking_uri(f"sqlite:///{directory}/other.db")
            loop.run(60)
            loop.manager.close()
            mlflow.set_tracking_uri(f"sqlite:///{directory}/store.db")
            print(mlflow.get_run(mlflow.active_run().info.run_id).info.status)
        assert not (directory / "other.db").exists()
    """
    done = run(program, tmp_path, "mlflow")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "RUNNING"
    assert held(tmp_path, "mlflow") == once(STEPS)


@pytest.mark.slow
def test_case_23_each_thread_has_the_run_that_is_active_there(tmp_path: Path) -> None:
    """MLflow knows an active run by thread: managers that are made in two threads write to the run of each."""
    shutil.copy(empty_store(), tmp_path / "store.db")
    program = """
        import threading, mlflow
        mlflow.set_tracking_uri(f"sqlite:///{directory}/store.db")
        runs = {}
        def work(name, steps):
            with mlflow.start_run() as run:
                runs[run.info.run_id] = steps
                loop = Loop(directory / name, ["mlflow"], close_timeout_seconds=60.0)
                loop.run(steps)
                loop.manager.close()
        threads = [threading.Thread(target=work, args=found) for found in (("a", 60), ("b", 90))]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(json.dumps(runs))
    """
    done = run(program, tmp_path, "mlflow")
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout.splitlines()[-1])
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/store.db")
    assert sorted(runs.values()) == [60, 90]
    for run_id, steps in runs.items():
        assert Counter(point.step for point in client.get_metric_history(run_id, NORM)) == once(range(1, steps + 1))
    assert len(client.search_runs(["0"])) == 2


@pytest.mark.slow
def test_case_14_store_without_room_is_told(tmp_path: Path) -> None:
    """A store that cannot grow costs neither the loop nor the close; after there is room a replay completes it."""
    shutil.copy(empty_store(), tmp_path / "store.db")
    program = """
        import resource
        options = {"name": "mlflow", "tracking_uri": f"sqlite:///{directory}/store.db", "experiment": "faults"}
        loop = Loop(directory / "run", [options], close_timeout_seconds=3.0)
        loop.run(60)
        await_delivery(loop, 60)
        (process,) = [worker._backend for worker in loop.manager._sink._delivery._workers.values()]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        loop.run(60)
        loop.manager.close()
        print(json.dumps(loop.manager.status()["backends"]["mlflow"]), flush=True)
    """
    done = run(program, tmp_path, "mlflow")
    assert done.returncode == 0, done.stderr
    assert status_of(done.stdout)["acknowledged"] == 60
    assert "mlflow has 60 of 120 rows (60 pending" in done.stderr.replace("took, but may not have kept,", "has")
    assert held(tmp_path, "mlflow") == once(range(1, 61))
    replay(tmp_path)
    assert held(tmp_path, "mlflow") == once(STEPS)


@pytest.mark.slow
def test_case_05_and_23_nested_run_and_autolog_of_the_user_stay_apart(tmp_path: Path) -> None:
    """Rows go to the run that was active at the start; a nested run and MLflow's own logging keep what is theirs."""
    shutil.copy(empty_store(), tmp_path / "store.db")
    program = """
        import mlflow
        mlflow.set_tracking_uri(f"sqlite:///{directory}/store.db")
        mlflow.autolog(silent=True)
        with mlflow.start_run() as parent:
            loop = Loop(directory / "run", ["mlflow"], close_timeout_seconds=60.0)
            with mlflow.start_run(nested=True) as child:
                loop.run(60)
                mlflow.log_metric("theirs", 1.0)
            mlflow.log_metric("outer", 2.0)
            loop.run(60)
            loop.manager.close()
            print(json.dumps([parent.info.run_id, child.info.run_id]))
    """
    done = run(program, tmp_path, "mlflow")
    assert done.returncode == 0, done.stderr
    parent, child = json.loads(done.stdout.splitlines()[-1])
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/store.db")
    assert Counter(point.step for point in client.get_metric_history(parent, NORM)) == once(STEPS)
    assert client.get_run(parent).data.metrics["outer"] == 2.0
    assert set(client.get_run(child).data.metrics) == {"theirs"}
    assert [client.get_run(one).info.status for one in (parent, child)] == ["FINISHED"] * 2
