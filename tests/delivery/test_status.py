"""Whatever ends a training or fills its disk, every recorded row is kept or counted. Each case has its number."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from gradtrack.delivery.destinations import consent
from gradtrack.delivery.replay import replay
from tests.delivery.training import journaled_steps, run_script, start_script

ALL = list(range(1, 201))


def json_steps(run_dir: Path) -> list[int]:
    """Return the steps in the JSON file of a run."""
    steps: list[int] = json.loads((run_dir / "gradient_statistics.json").read_text())["step"]
    return steps


KILLS = ["os.kill(os.getpid(), signal.SIGKILL)", pytest.param("os._exit(0)", marks=pytest.mark.slow)]


@pytest.mark.parametrize("end", KILLS)
def test_case_07_killed_process_loses_no_row(tmp_path: Path, end: str) -> None:
    """After a kill the journal has every step, and a replay completes the tracker without a duplicate."""
    done = run_script(f"loop = Loop(sys.argv[1], ['json']); loop.run(200); {end}", tmp_path)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    assert journaled_steps(tmp_path) == ALL
    assert replay(tmp_path)[0].complete
    assert replay(tmp_path)[0].delivered == 0
    assert json_steps(tmp_path) == ALL


@pytest.mark.slow
def test_case_07_killed_while_its_tracker_hangs(tmp_path: Path) -> None:
    """A tracker that took nothing before the kill gets everything from the replay."""
    code = """
import threading
class Hanging(FileBackend):
    def write(self, records): threading.Event().wait()
loop = Loop(sys.argv[1], [Hanging(Path(sys.argv[1]) / "out")])
loop.run(200)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_script(code, tmp_path).returncode == -signal.SIGKILL
    assert replay(tmp_path, to="json")[0].delivered == 200
    assert json_steps(tmp_path) == ALL


def test_case_08_terminated_process_loses_no_row(tmp_path: Path) -> None:
    """SIGTERM, which runs no exit hooks, finds every row in the journal."""
    started = start_script("Loop(sys.argv[1], ['json']).run(200); print('ready', flush=True); signal.pause()", tmp_path)
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    started.terminate()
    started.communicate(timeout=60)
    assert started.returncode == -signal.SIGTERM
    assert journaled_steps(tmp_path) == ALL
    replay(tmp_path)
    assert json_steps(tmp_path) == ALL


HANDLERS = {
    "sys.exit(3)": (3, False),
    "raise Terminated": (1, True),
    "raise TimeoutError": (1, True),
    "os.kill(os.getpid(), signal.SIGINT)": (-signal.SIGINT, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("does", HANDLERS)
def test_case_08_handler_of_the_user_ends_the_training(tmp_path: Path, does: str) -> None:
    """Whatever a handler raises, wherever it strikes, ends the loop; every row is journaled, and delivered once."""
    code = f"""
class Terminated(Exception): pass
def handle(number, frame):
    {does}
signal.signal(signal.SIGTERM, handle)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run behind a shell ignores it
loop = Loop(sys.argv[1], [FileBackend(Path(sys.argv[1]) / "out")])
loop.run(20)
print("ready", flush=True)
loop.run(10**9)
"""
    for turn in range(4):
        run_dir = tmp_path / str(turn)
        started = start_script(code, run_dir)
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        started.terminate()
        _, err = started.communicate(timeout=60)
        returncode, failed = HANDLERS[does]
        assert started.returncode == returncode, err
        steps = journaled_steps(run_dir)
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= 20
        rows = (run_dir / "out").read_text().split("\n")
        assert rows == [*map(str, steps), f"closed failed={failed}", ""]


def test_managers_of_threads_are_closed_at_the_exit(tmp_path: Path) -> None:
    """Two trainings in threads that are over when the script ends have delivered everything, each to its own."""
    code = """
import threading
loops = []
def work(name):
    loop = Loop(Path(sys.argv[1]) / name, [FileBackend(Path(sys.argv[1]) / f"out-{name}")])
    loop.run(200)
    loops.append(loop)
threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    done = run_script(code, tmp_path)
    assert done.returncode == 0, done.stderr
    for name in "ab":
        assert journaled_steps(tmp_path / name) == ALL
        rows = (tmp_path / f"out-{name}").read_text().split("\n")
        assert rows == [*map(str, ALL), "closed failed=False", ""]


def test_case_14_full_disk_never_reaches_the_training(tmp_path: Path) -> None:
    """With no room for journal and files the training goes on, other trackers get all rows, and the loss is told."""
    code = """
import resource
class Elsewhere(FileBackend):
    steps = []
    def write(self, records): self.steps += [record.step for record in records]
    def close(self, *, failed=False): pass
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
loop = Loop(sys.argv[1], ["json", Elsewhere(Path("unused"))], close_timeout_seconds=1.0)
loop.run(200)
loop.manager.close()
status = loop.manager.status()
print(json.dumps([Elsewhere.steps, status["journal"], status["backends"]]))
"""
    done = run_script("import json\n" + code, tmp_path)
    assert done.returncode == 0, done.stderr
    steps, journal, backends = json.loads(done.stdout)
    assert steps == ALL
    assert journal["rows"] == len(journaled_steps(tmp_path)) < 200
    assert journal["rows"] + journal["failed"] == 200
    assert "OSError" in journal["fault"]
    assert f"{journal['failed']} rows are not in the journal" in done.stderr
    kept = json_steps(tmp_path)
    claimed = backends["json"]["acknowledged"]
    assert backends["json"]["unsettled"] is not None or claimed <= len(kept)


def test_case_20_forked_child_is_silent_and_harmless(tmp_path: Path) -> None:
    """A child's steps record nothing and warn once, its exit closes nothing, and the parent's series is whole."""
    code = """
loop = Loop(sys.argv[1], ["memory", FileBackend(Path(sys.argv[1]) / "out")])
loop.run(100)
child = os.fork()
if child == 0:
    loop.run(20)
    loop.manager.flush()
    print(len(loop.manager.backend("memory").records), flush=True)
    sys.exit(0)
os.waitpid(child, 0)
loop.run(100)
loop.manager.close()
"""
    done = run_script(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "100\n"
    assert done.stderr.count("it records nothing") == 1
    assert journaled_steps(tmp_path) == ALL
    assert (tmp_path / "out").read_text().split("\n") == [*map(str, ALL), "closed failed=False", ""]


@pytest.mark.slow
def test_case_20_first_step_in_a_child_leaves_the_run_alone(tmp_path: Path) -> None:
    """A manager that only its forked child uses writes nothing either: its trackers belong to the parent."""
    code = """
loop = Loop(sys.argv[1], [FileBackend(Path(sys.argv[1]) / "out")])
child = os.fork()
if child == 0:
    loop.run(5)
    sys.exit(0)
os.waitpid(child, 0)
"""
    done = run_script(code, tmp_path)
    assert "it records nothing" in done.stderr
    assert list(tmp_path.glob("journal*")) == []
    assert (tmp_path / "out").read_text() == "closed failed=False\n"


ENDS = {
    "": ("0", False),
    "sys.exit(0)": ("0", False),
    "sys.exit(3)": ("3", False),
    "raise RuntimeError('training broke')": ("1", True),
}


@pytest.mark.parametrize("end", [pytest.param(end, marks=() if ENDS[end][1] else pytest.mark.slow) for end in ENDS])
def test_case_21_exit_without_close_delivers_everything(tmp_path: Path, end: str) -> None:
    """However a script ends by itself, all rows arrive, and a tracker hears whether the training raised."""
    code = f"""
import atexit, threading
gate = threading.Event()
class Waiting(FileBackend):
    def write(self, records):
        gate.wait()
        super().write(records)
loop = Loop(sys.argv[1], [Waiting(Path(sys.argv[1]) / "out")])
loop.run(200)
atexit.register(gate.set)
{end}
"""
    done = run_script(code, tmp_path)
    returncode, failed = ENDS[end]
    assert str(done.returncode) == returncode, done.stderr
    assert (tmp_path / "out").read_text().split("\n") == [*map(str, ALL), f"closed failed={failed}", ""]


def test_case_21_delivery_comes_before_the_trackers_own_exit(tmp_path: Path) -> None:
    """A tracker that is set up after the manager, and ends its run at exit, is still there for the last rows."""
    code = """
import atexit
backend = FileBackend(Path(sys.argv[1]) / "out")
loop = Loop(sys.argv[1], [backend])
atexit.register(backend.tell, "the tracker's own hook")
loop.run(3)
"""
    assert run_script(code, tmp_path).returncode == 0
    assert (tmp_path / "out").read_text().split("\n")[-3:] == ["closed failed=False", "the tracker's own hook", ""]


@pytest.mark.slow
def test_case_21_hanging_tracker_does_not_keep_the_exit(tmp_path: Path) -> None:
    """A write that never returns costs the time limit; the last line says where the rows are."""
    code = """
import threading
class Hanging(FileBackend):
    def write(self, records): threading.Event().wait()
Loop(sys.argv[1], [Hanging(Path("unused"))], close_timeout_seconds=0.2).run(10)
"""
    done = run_script(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"gradtrack replay {tmp_path}" in done.stderr
    assert "file has 0 of 10 rows (10 pending" in done.stderr


RANKS = """
from gradtrack import registry
from tests.plugins import entry_points_of
class Marked(FileBackend):
    def __init__(self):
        super().__init__(Path(sys.argv[1]) / "out")
        self.tell("made")
registry.entry_points = entry_points_of(marked="__main__:Marked")
loop = Loop(sys.argv[1], ["marked", "memory"])
loop.run(5)
loop.manager.close()
print(len(loop.manager.reports), len(loop.manager.backend("memory").records))
"""


VARIABLES = [("RANK", 2), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ("RANK", "SLURM_PROCID"))]


@pytest.mark.parametrize(("variable", "size"), VARIABLES)
def test_case_22_only_rank_0_makes_and_feeds_trackers(tmp_path: Path, variable: str, size: int) -> None:
    """Of all processes every one reports and journals; one makes a run and writes to it."""
    for rank in reversed(range(size)):
        done = run_script(RANKS, tmp_path, **{variable: str(rank)})
        assert done.returncode == 0, done.stderr
        assert done.stdout == ("5 5\n" if rank == 0 else "5 0\n")
    assert (tmp_path / "out").read_text().split("\n") == ["made", *"12345", "closed failed=False", ""]
    names = sorted(path.name for path in tmp_path.glob("journal*.jsonl"))
    assert names == ["journal-000.jsonl", *(f"journal-rank{rank}-000.jsonl" for rank in range(1, size))]


GROUP = """
import torch.distributed as distributed
rank = int(sys.argv[2])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/rendezvous", rank=rank, world_size=4)
"""


@pytest.mark.slow
def test_case_22_rank_of_an_initialised_group(tmp_path: Path) -> None:
    """Without a launcher's variables the group itself says which process delivers."""
    started = [start_script(GROUP + RANKS, tmp_path, rank) for rank in range(4)]
    outputs = [one.communicate(timeout=120) for one in started]
    assert [one.returncode for one in started] == [0] * 4, outputs
    assert (tmp_path / "out").read_text().split("\n") == ["made", *"12345", "closed failed=False", ""]
    assert len(list(tmp_path.glob("journal*.jsonl"))) == 4


SECRET = "s3cr3t-Zq9"


def test_case_24_secrets_are_nowhere(tmp_path: Path) -> None:
    """A password and a token in an address and a key in the environment come out of no part of a broken run."""
    code = f"""
import logging
from gradtrack import registry
from tests.plugins import entry_points_of
logging.basicConfig(level=logging.DEBUG)
uri = "http://user:{SECRET}@127.0.0.1:9/path?token={SECRET}"
class Leaking(FileBackend):
    def __init__(self, tracking_uri=""):
        self.uri = tracking_uri
    def write(self, records):
        raise OSError(f"API request to {{self.uri}} failed, key {{os.environ['WANDB_API_KEY']}}")
    def address(self):
        return {{"tracking_uri": self.uri}}
    def close(self, *, failed=False):
        raise OSError(self.uri)
registry.entry_points = entry_points_of(leaking="__main__:Leaking")
loop = Loop(sys.argv[1], [{{"name": "leaking", "tracking_uri": uri}}], close_timeout_seconds=0.1, verbose_logging=True)
loop.run(3)
print(loop.manager.status(), loop.manager.config, repr(loop.manager.config), loop.manager.reports)
loop.manager.save_training_log(Path(sys.argv[1]) / "log.json")
loop.manager.close()
print(loop.manager.status())
try:
    loop.manager.config.backends = [{{"tracking_uri": uri}}]
except Exception as fault:
    print(fault)
"""
    done = run_script(code, tmp_path, WANDB_API_KEY=f"key-{SECRET}-key")
    assert done.returncode == 0, done.stderr
    assert "API request to http://***@127.0.0.1:9/path" in done.stderr
    written = {path.name: path.read_bytes().decode("latin-1") for path in tmp_path.iterdir()}
    assert {"journal-000.jsonl", "log.json"} <= set(written)
    for name, text in {"stdout": done.stdout, "stderr": done.stderr, **written}.items():
        assert SECRET not in text, name


def test_the_command_that_delivers_the_rest_has_what_a_replay_asks_for(tmp_path: Path) -> None:
    """A directory outside of the run's and a server elsewhere, each once, without the credentials in an address."""
    backends = [
        {"name": "tensorboard", "options": {"log_dir": str(tmp_path / "logs")}},
        {"name": "json", "options": {"directory": str(tmp_path / "run" / "json")}},
        {"name": "mlflow", "options": {"tracking_uri": "https://user:secret@tracker.example/ml", "run_id": "a"}},
        {"name": "other", "options": {"log_dir": str(tmp_path / "logs")}},
        {"name": "mlflow", "options": {"tracking_uri": f"sqlite:///{tmp_path}/my%20runs/mlflow.db"}},
    ]
    assert consent(backends, tmp_path / "run") == [
        *("--allow", str(tmp_path / "logs")),
        *("--tracking-uri", "https://tracker.example/ml"),
        *("--allow", str(tmp_path / "my runs" / "mlflow.db")),
        *("--allow", str(tmp_path / "my%20runs" / "mlflow.db")),
    ]


def test_the_command_that_delivers_the_rest_never_allows_everything(tmp_path: Path) -> None:
    """A store whose file cannot be told is named itself."""
    address = f"sqlite:///{tmp_path}/store.db"
    backends = [
        {"name": "mlflow", "options": {"tracking_uri": f"{address}?***"}},
        {"name": "tensorboard", "options": {"log_dir": "/"}},
    ]
    assert consent(backends, tmp_path / "run") == ["--tracking-uri", address]
