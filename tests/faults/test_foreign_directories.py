"""What a run directory that was made by another person cannot do."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradtrack.backends.mlflow.store import metric_name
from gradtrack.cli import app
from gradtrack.config import GradientConfig
from gradtrack.delivery import replay as module
from gradtrack.delivery.journal.writing import Journal
from gradtrack.delivery.replay import replay
from gradtrack.delivery.run_files import LISTED_FILES
from gradtrack.errors import ConfigError
from gradtrack.records import Record, RunInfo
from tests.backends.stores import empty_store
from tests.delivery.doubles import row
from tests.processes import ROOT

SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----"
KINDS = ("csv", "jsonl", "parquet")


def foreign_run(directory: Path, options: dict[str, Any], backend: str = "mlflow", run_id: str = "foreign") -> Path:
    """Write the run directory of a stranger, whose journal names a backend."""
    run = RunInfo(run_id=run_id, run_dir=str(directory))
    journal = Journal(directory, run, backends=[{"name": backend, "options": options}])
    for step in range(3):
        journal.append(step, row(step))
    journal.close(10.0)
    return directory


def point_to(directory: Path, secret: Path, run_id: str = "foreign") -> None:
    """Leave names in a run directory that lead to a file of the user's."""
    secret.write_bytes(SECRET)
    (directory / "link.png").symlink_to(secret)
    os.link(secret, directory / "name.png")
    (directory / "way").symlink_to(secret.parent)
    (directory / "training_curves.png").write_bytes(b"picture")
    names = ["link.png", "name.png", "training_curves.png", str(secret), f"way/{secret.name}", f"../{secret.name}"]
    (directory / LISTED_FILES).write_text(json.dumps({"run_id": run_id, "files": names}))


def test_no_file_of_the_user_is_uploaded(mlflow_server: str, tmp_path: Path) -> None:
    """Links and second names in a run directory lead nowhere, whatever a list of the run's files says."""
    client: Any = importlib.import_module("mlflow").MlflowClient(mlflow_server)
    experiment = client.create_experiment("foreign files")
    foreign_run(tmp_path / "run", {"experiment": "foreign files"}, run_id="foreign-files")
    point_to(tmp_path / "run", tmp_path / "secret", "foreign-files")
    (done,) = replay(tmp_path / "run", tracking_uri=mlflow_server)
    assert done.complete, done
    (found,) = client.search_runs([experiment])
    assert [entry.path for entry in client.list_artifacts(found.info.run_id, "gradtrack")] == [
        "gradtrack/training_curves.png"
    ]


def test_store_in_the_run_directory_sends_no_file_out_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A store that another person has made may say that the files of a run belong anywhere."""
    directory = tmp_path / "run"
    directory.mkdir()
    shutil.copy(empty_store(), directory / "store.db")
    address = f"sqlite:///{directory}/store.db"
    client: Any = importlib.import_module("mlflow").MlflowClient(address)
    client.create_experiment("foreign", artifact_location=f"file://{tmp_path}/home")
    foreign_run(directory, {"tracking_uri": address, "experiment": "foreign"})
    (directory / "training_curves.png").write_bytes(b"picture")
    (directory / LISTED_FILES).write_text(json.dumps({"run_id": "foreign", "files": ["training_curves.png"]}))
    (done,) = replay(directory)
    assert done.complete, done
    assert not (tmp_path / "home").exists()
    assert "files are left out" in caplog.text


def test_files_of_a_store_in_the_run_directory_go_through_no_link(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store chooses the place of its files, which another option than that of the header may have named."""
    directory, victim = tmp_path / "run", tmp_path / "victim"
    (directory / "artifacts").mkdir(parents=True)
    victim.mkdir()
    shutil.copy(empty_store(), directory / "store.db")
    address = f"sqlite:///{directory}/store.db"
    client: Any = importlib.import_module("mlflow").MlflowClient(address)
    run = client.create_run(client.create_experiment("foreign", artifact_location=f"file://{directory}/artifacts"))
    place = directory / "artifacts" / run.info.run_id / "artifacts"
    place.mkdir(parents=True)
    (place / "gradtrack").symlink_to(victim)
    foreign_run(directory, {"tracking_uri": address, "run_id": run.info.run_id})
    (directory / "training_curves.png").write_bytes(b"picture")
    (directory / LISTED_FILES).write_text(json.dumps({"run_id": "foreign", "files": ["training_curves.png"]}))
    (done,) = replay(directory)
    assert done.complete, done
    assert list(victim.iterdir()) == []
    assert "is a link out of the run's directory" in caplog.text


def test_journal_of_a_store_removes_no_file(tmp_path: Path) -> None:
    """SQLite would end what a crash left of a change of several stores, and remove the file that told of it."""
    directory, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("mine")
    foreign_run(directory, {"tracking_uri": f"sqlite:///{directory}/store.db"})
    shutil.copy(empty_store(), directory / "store.db")
    content, name = (directory / "store.db").read_bytes(), str(victim).encode()
    size = int.from_bytes(content[16:18])
    magic, checksum = bytes.fromhex("d9d505f920a163d7"), sum(content[size - 200 : 0 : -200])
    head = magic + struct.pack(">5I", 1, 0, len(content) // size, 512, size)
    page = struct.pack(">I", 1) + content[:size] + struct.pack(">I", checksum)
    tail = struct.pack(">I", 2**30 // size + 1) + name + struct.pack(">2I", len(name), sum(name)) + magic
    journal = directory / "store.db-journal"
    journal.write_bytes(head.ljust(512, b"\0") + page + tail)
    (done,) = replay(directory)
    assert done.fault is not None
    assert "names a file that SQLite would remove" in done.fault
    assert victim.exists()
    sqlite3.connect(directory / "store.db").execute("SELECT * FROM runs").close()
    assert not victim.exists()  # what SQLite does by itself
    journal.write_bytes(head.ljust(512, b"\0") + page)
    (done,) = replay(directory)
    assert done.complete, done


PLACES = [
    ("json", {"directory": "{}/x"}, "x/foreign"),
    ("tensorboard", {"log_dir": "{}/x"}, "x/foreign"),
    ("tensorboard", {"log_dir": "{}"}, "gradtrack"),
    ("wandb", {"directory": "{}/x"}, "x/wandb"),
    ("wandb", {"directory": "{}/x"}, "x/.wandb"),
    ("wandb", {}, ".wandb"),
]


@pytest.mark.parametrize(("backend", "options", "link"), PLACES)
def test_no_tracker_writes_through_a_link(tmp_path: Path, backend: str, options: dict[str, str], link: str) -> None:
    """Whatever place inside of the run's directory the header names."""
    directory, victim = tmp_path / "run", tmp_path / "victim"
    victim.mkdir()
    (victim / "gradient_statistics.json").write_text("{}")
    foreign_run(directory, {name: value.format(directory) for name, value in options.items()}, backend=backend)
    (directory / link).parent.mkdir(exist_ok=True)
    (directory / link).symlink_to(victim)
    (done,) = replay(directory)
    assert done.fault is not None
    assert f"--allow {victim}" in done.fault
    assert [path.name for path in victim.iterdir()] == ["gradient_statistics.json"]
    assert (victim / "gradient_statistics.json").read_text() == "{}"


def test_no_text_of_a_name_replaces_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of files keeps a name that MLflow cannot hold as the content of a file."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    directory, profile, name = tmp_path / "run", tmp_path / ".profile", "x\nexport OWNED=1\ny"
    profile.write_text("mine")
    store = str(directory / "mlruns")
    run = importlib.import_module("mlflow").MlflowClient(store).create_run("0")
    tag = next(directory.rglob("tags")) / f"gradtrack.name.{metric_name(name)[-12:]}"
    tag.symlink_to(profile)
    options = {"tracking_uri": store, "run_id": run.info.run_id}
    journal = Journal(directory, RunInfo(run_id="foreign"), backends=[{"name": "mlflow", "options": options}])
    journal.append(0, Record(step=0, time=1.0, metrics={name: 1.0}))
    journal.close(10.0)
    (done,) = replay(directory)
    assert done.fault is not None
    assert profile.read_text() == "mine"
    tag.unlink()
    lay_pipe(tag)
    (done,) = replay(directory)
    assert done.fault is not None
    assert "is a pipe, a socket or a device" in done.fault
    tag.unlink()
    (done,) = replay(directory)
    assert (done.complete, tag.read_text()) == (True, name)


@pytest.mark.process
def test_links_that_wandb_makes_stop_no_replay(tmp_path: Path) -> None:
    """A run of the user's own is replayed into the directory in which W&B has kept it, also one reached by a link."""
    directory = foreign_run(tmp_path / "run", {"directory": str(tmp_path / "run" / "x")}, backend="wandb")
    (tmp_path / "way").symlink_to(directory)
    told = subprocess.run(
        [sys.executable, "-c", OFFLINE_RUN, str(directory / "x")], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    links = {path.name: path for path in (directory / "x").rglob("*") if path.is_symlink()}
    assert {"latest-run", "debug.log"} <= links.keys()
    for place, delivered in ((directory, 3), (tmp_path / "way", 0)):
        (done,) = replay(place)
        assert (done.complete, done.delivered) == (True, delivered), done


OFFLINE_RUN = """
import sys, wandb
run = wandb.init(dir=sys.argv[1], mode="offline", project="own")
run.log({"loss": 1.0})
run.finish()
"""


@pytest.mark.process
def test_output_of_a_tracker_controls_no_terminal(tmp_path: Path) -> None:
    """W&B prints its directory and the names of metrics."""
    escape = "\x1b]0;owned\x07"
    outputs = []
    for number, options in enumerate([{"directory": str(tmp_path / "0" / f"a{escape}b")}, {"project": escape}, {}]):
        directory = tmp_path / str(number)
        journal = Journal(directory, RunInfo(run_id="foreign"), backends=[{"name": "wandb", "options": options}])
        metrics = {"train/grad_norm": 1.0, f"train/{escape}": 1.0}
        journal.append(0, Record(step=0, time=1.0, metrics=metrics, source=f"pair{escape}"))
        journal.close(10.0)
        command = [sys.executable, "-m", "gradtrack", "replay", str(directory)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "WANDB_SILENT": "false"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment)
        outputs.append(done.stdout + done.stderr)
        assert done.returncode == (1 if options else 0), outputs[-1]
        assert not [letter for letter in outputs[-1] if not letter.isprintable() and letter != "\n"]
    assert all("expected a text without control characters" in text for text in outputs[:2])
    assert "Run summary" in outputs[2]
    assert "owned" in outputs[2]


def test_settings_in_the_run_directory_choose_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B would read its server from a file below the working directory, which may be the run's."""
    foreign_run(tmp_path / "run", {}, backend="wandb")
    (tmp_path / "run" / "wandb").mkdir()
    (tmp_path / "run" / "wandb" / "settings").write_text("[default]\nbase_url = https://tracking.example\n")
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    (done,) = replay(tmp_path / "run")
    assert done.fault is not None
    assert "may name a server" in done.fault


RUN = "0123456789abcdef"


class Refusing(BaseHTTPRequestHandler):
    """Shows a run and takes no row of it, as a server does whose user may only read."""

    bodies: list[bytes]

    def _answer(self) -> None:
        self.bodies.append(self.path.encode() + self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        info = {"run_id": RUN, "experiment_id": "0", "status": "RUNNING", "artifact_uri": f"mlflow-artifacts:/{RUN}"}
        answer = json.dumps({"run": {"info": info, "data": {}}}).encode()
        self.send_response(403 if b"log-batch" in self.bodies[-1] else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_PUT = do_PATCH = do_HEAD = _answer

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def refusing() -> Iterator[tuple[str, list[bytes]]]:
    """Serve something that refuses every row, and keep what it was sent."""
    handler = type("Kept", (Refusing,), {"bodies": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.bodies  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


def test_refused_server_gets_no_file(
    refusing: tuple[str, list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the rows could not be delivered, the close sends nothing either."""
    monkeypatch.setattr(module, "_DELAYS_SECONDS", ())
    address, sent = refusing
    foreign_run(tmp_path / "run", {"run_id": RUN})
    point_to(tmp_path / "run", tmp_path / "secret")
    (done,) = replay(tmp_path / "run", tracking_uri=address)
    assert done.fault is not None
    assert sent
    assert not [body for body in sent if b"artifact" in body or b"picture" in body or SECRET in body]


@pytest.mark.parametrize(
    ("command", "name"), [("report", "report.html"), *((f"export --format {kind}", f"steps.{kind}") for kind in KINDS)]
)
def test_no_command_writes_through_a_link(tmp_path: Path, command: str, name: str) -> None:
    """What is written in the run's directory replaces a link, and leaves alone the file that it leads to."""
    if name == "steps.parquet":
        pytest.importorskip("pyarrow")
    directory, secret = foreign_run(tmp_path / "run", {}, backend="json"), tmp_path / "secret"
    secret.write_bytes(SECRET)
    (directory / name).symlink_to(secret)
    done = CliRunner().invoke(app, [*command.split(), str(directory)])
    assert done.exit_code == 0, done.output
    assert secret.read_bytes() == SECRET
    assert not (directory / name).is_symlink()


def lay_pipe(path: Path) -> None:
    """Make a pipe that no process writes to."""
    os.mkfifo(path)


def lay_sparse_file(path: Path) -> None:
    """Make a file of 50 GB, which takes no room."""
    with path.open("wb") as stream:
        stream.truncate(50 * 2**30)


def lay_link_to_device(path: Path) -> None:
    """Make a link to a device that never ends."""
    path.symlink_to("/dev/zero")


NAMES = [
    "journal-000.jsonl",
    "journal-001.jsonl",
    "journal-000.tail",
    "journal-000.acknowledged.json",
    "run_end.json",
    LISTED_FILES,
    "gradient_statistics.json",
    "gradient_gain.png",
    "report.html",
    "steps.csv",
    "tensorboard/events.out.tfevents.1.host.1.0",
]
COMMANDS = ["show", "report", "export", "diff", "replay"]
CALLS = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (4 * 2**30,) * 2)
from gradtrack.cli import main
_, runs, good, *commands = sys.argv
for command in commands:
    for name in os.listdir(runs):
        more = {"diff": [good], "replay": ["--to", "tensorboard"]}.get(command, [])
        sys.argv = ["gradtrack", command, os.path.join(runs, name), *more]
        try:
            main()
        except SystemExit as end:
            print("ended", command, name, end.code, flush=True)
"""


@pytest.mark.parametrize("lay", [lay_pipe, lay_sparse_file, lay_link_to_device])
def test_special_files_neither_hang_nor_fill_memory(tmp_path: Path, lay: Callable[[Path], None]) -> None:
    """Whatever file of a run directory is one, every command that reads it ends soon, in little memory, on one line."""
    foreign_run(tmp_path / "good", {}, backend="json")
    for number, name in enumerate(NAMES):
        directory = foreign_run(tmp_path / "runs" / str(number), {}, backend="json")
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).unlink(missing_ok=True)
        lay(directory / name)
    command = [sys.executable, "-c", CALLS, str(tmp_path / "runs"), str(tmp_path / "good"), *COMMANDS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    ends = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ended ")]
    assert len(ends) == len(NAMES) * len(COMMANDS)
    # A replay refuses a link and a pipe among the files of a tracker, which the last of the names lies among.
    refused = [[command, name] for command, name, code in ends if code == "1"]
    assert refused == [["replay", str(len(NAMES) - 1)]] * (lay is not lay_sparse_file)
    assert {code for _, _, code in ends} <= {"0", "1", "2"}


def test_configuration_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    """It would be waited for."""
    os.mkfifo(tmp_path / "gradtrack.yaml")
    with pytest.raises(ConfigError, match="not a regular file"):
        GradientConfig.load(tmp_path / "gradtrack.yaml")
