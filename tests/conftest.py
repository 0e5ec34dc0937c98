"""What all tests share."""

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.selection import marks_of
from tests.training import INTERPRETED

# An interpreted kernel takes milliseconds: the slow tests have the more thorough profile.
for _name, _examples in (("gradtrack", 6 if INTERPRETED else 40), ("thorough", 25 if INTERPRETED else 1000)):
    settings.register_profile(
        _name, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=_examples
    )
settings.load_profile("gradtrack")
torch.set_num_threads(1)

_STARTS: Final = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "socket.bind"})
_not_yet: dict[str, None] = {}
"""Of these events those that have not happened in the test under way."""

platform.platform()  # asks a program, once in a process: no test is to blame
# Not a function of Python, which torch would compile where it happens to be called, and which would take time.
sys.addaudithook(_not_yet.pop)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the files unread whose tests would all be left out: importing a framework takes seconds."""
    if "not (process or long)" not in config.option.markexpr or not collection_path.is_relative_to(config.rootpath):
        return None
    return bool(marks_of(collection_path.relative_to(config.rootpath).as_posix())) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that `make test-fast` leaves out."""
    for item in items:
        for mark in marks_of(item.nodeid):
            item.add_marker(mark)


@pytest.fixture(autouse=True)
def _process_is_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that starts a process or a server and is not marked so."""
    _not_yet.update(dict.fromkeys(_STARTS))
    yield
    started = sorted(_STARTS - _not_yet.keys())
    if started and not any(request.node.get_closest_marker(mark) for mark in ("process", "slow", "exhaustive")):
        pytest.fail(f"{started[0]}: expected a test marked process. Add it to PROCESS in tests/selection.py.")


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in an empty directory and from one seed."""
    monkeypatch.chdir(tmp_path)
    torch.default_generator.manual_seed(0)  # torch.manual_seed keeps a stack for each kind of device that is not there


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Take back what a tracker leaves in the environment for its own children: MLflow names its experiment there."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() | before.keys():
        if name.startswith(("MLFLOW_", "WANDB_")) and os.environ.get(name) != before.get(name):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
