"""Any function that takes metrics and a step is a tracker: rows once and in order, and code only by the user's word."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradtrack import GradientManager
from gradtrack.backends.callable import CallableBackend
from gradtrack.cli import app
from gradtrack.delivery.replay import replay
from gradtrack.delivery.writer import Writer
from gradtrack.errors import InputTypeError, PermanentBackendError, UsageError
from gradtrack.records import RunInfo
from tests.backends.rows import make_records
from tests.training import train

MODULE = """
import json

def log(metrics, step):
    with open("rows.jsonl", "a") as file:
        file.write(json.dumps([step, metrics["train/grad_norm"]]) + "\\n")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the import path of a function in the working directory, which is not among the places of Python."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.delitem(sys.modules, "my_log", raising=False)
    (tmp_path / "my_log.py").write_text(MODULE)
    return "my_log:log"


def steps_in(path: Path) -> list[int]:
    """Return the steps that the function of the module was given."""
    return [json.loads(line)[0] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: lambda metrics, step: rows.append(step),
        lambda rows: lambda dic, prefix=None, step=None, epoch=None: rows.append((prefix, step)[1]),
        lambda rows: lambda data, iteration: rows.append(iteration),
        lambda rows: lambda *given, **named: rows.append({**named, "given": given}["step"]),
    ],
    ids=["by name", "by name behind another", "by position", "anything"],
)
def test_the_step_is_passed_as_the_function_takes_it(make: Callable[[list[int]], Any]) -> None:
    """By its name, where one is called so wherever it stands, else as the second argument."""
    rows: list[int] = []
    CallableBackend(log=make(rows)).write(make_records(3))
    assert rows == [1, 2, 3]


def test_a_row_that_raised_comes_again_and_no_other_twice() -> None:
    """A batch of which some were taken is completed."""
    taken: list[int] = []
    broken = iter([False, False, True, True, False, False, False, False])

    def log(metrics: dict[str, float], step: int) -> None:
        if next(broken):
            raise ConnectionError("away")
        taken.append(step)

    writer = Writer(CallableBackend(log=log), RunInfo(run_id="r"))
    rows = list(enumerate(make_records(5)))
    for again in (False, True):
        with pytest.raises(ConnectionError):
            writer.write(rows, again=again)
    writer.write(rows, again=True)
    assert taken == [1, 2, 3, 4, 5]


def test_a_row_that_is_refused_for_good_costs_no_other() -> None:
    """`PermanentBackendError` leaves one row out."""
    taken: list[int] = []

    def log(metrics: dict[str, float], step: int) -> None:
        if step == 3:
            raise PermanentBackendError("this one never")
        taken.append(step)

    writer = Writer(CallableBackend(log=log), RunInfo(run_id="r"))
    writer.write(list(enumerate(make_records(5))))
    assert (taken, writer.refused) == ([1, 2, 4, 5], [2])


def test_a_dead_tracker_harms_no_training_and_a_replay_brings_its_rows(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a training whose function raised arrive once, however often a replay is called."""

    def away(metrics: dict[str, float], step: int) -> None:
        raise ConnectionError("away")

    spec = {"name": "callable", "log": away}
    manager = GradientManager(
        backends=[spec],
        run_dir="run",
        grad_log_every_n_steps=1,
        close_timeout_seconds=0.3,
        engine="torch",
        save_gradient_plots=False,
    )
    assert len(train(manager, 4)) == 4
    manager.close()
    assert manager.status()["backends"]["callable"]["acknowledged"] == 0
    monkeypatch.syspath_prepend(str(tmp_path))
    for delivered in (4, 0):
        (done,) = replay("run", options={"log": module})
        assert (done.complete, done.delivered) == (True, delivered), done
    assert steps_in(tmp_path / "rows.jsonl") == [1, 2, 3, 4]


def test_code_that_only_a_journal_names_is_not_imported(module: str, tmp_path: Path) -> None:
    """A run of another person cannot have its code run, until the user names it on the command line."""
    sys.path.append(str(tmp_path))
    settings: dict[str, Any] = {
        "backends": [{"name": "callable", "log": module}],
        "grad_log_every_n_steps": 1,
        "engine": "torch",
        "save_gradient_plots": False,
    }
    with GradientManager(run_dir="run", **settings) as manager:
        train(manager, 3)
    assert steps_in(tmp_path / "rows.jsonl") == [1, 2, 3]
    (tmp_path / "rows.jsonl").unlink()
    next(tmp_path.glob("run/*.acknowledged.json")).unlink()
    del sys.modules["my_log"]
    sys.path.remove(str(tmp_path))
    (done,) = replay("run")
    assert "expected code that you have chosen" in (done.fault or "")
    assert "--log my_log:log" in (done.fault or "")
    assert "my_log" not in sys.modules
    found = CliRunner().invoke(app, ["replay", "run", "--log", module], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    assert steps_in(tmp_path / "rows.jsonl") == [1, 2, 3]


def test_the_command_that_delivers_the_rest_names_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A training that is left with rows says how to bring them."""
    (tmp_path / "broken_log.py").write_text("def log(metrics, step):\n    raise OSError('away')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = {"name": "callable", "log": "broken_log:log"}
    manager = GradientManager(
        backends=[spec], run_dir="run", close_timeout_seconds=0.3, engine="torch", save_gradient_plots=False
    )
    train(manager, 2)
    manager.close()
    assert "gradtrack replay" in caplog.text
    assert "--log broken_log:log" in caplog.text


async def not_now(metrics: dict[str, float], step: int) -> None:
    """Do nothing, later."""


@pytest.mark.parametrize(
    ("log", "text"),
    [
        (None, "expected a function"),
        (3, "expected a function"),
        (not_now, "not async"),
        ("my_log", "no module before a colon"),
        ("no_such_module:log", "No module named 'no_such_module'"),
        ("json:no_such", "has no attribute 'no_such'"),
        ("json:__doc__", "expected a function"),
        (lambda metrics: None, "expected metrics and a step"),
        (lambda metrics, step, key: None, "missing a required argument: 'key'"),
    ],
)
def test_what_cannot_be_called_is_refused_with_the_way(log: Any, text: str) -> None:
    """The error comes when the manager is made."""
    with pytest.raises(UsageError, match="callable: log") as caught:
        GradientManager(backends=[{"name": "callable", "log": log}])
    assert text in str(caught.value)
    assert "log='my_module:log'" in str(caught.value)


def test_a_function_alone_is_no_backend() -> None:
    """The error says how to pass it."""
    with pytest.raises(InputTypeError, match=r"\{'name': 'callable', 'log': \.\.\.\}"):
        GradientManager(backends=[print])


def test_the_doctor_names_the_function(module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It says where rows would go, and calls nothing."""
    monkeypatch.syspath_prepend(str(tmp_path))
    assert CallableBackend.probe(log=module) == "the function my_log:log"
    assert CallableBackend.probe(log=print) == "the function print"
    assert not (tmp_path / "rows.jsonl").exists()
