"""The doctor says where records would go, and leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradtrack import registry
from gradtrack.backends.base import Backend
from gradtrack.delivery.preflight import BackendState, examine
from gradtrack.errors import BackendError, MissingExtraError
from gradtrack.records import Record
from tests.plugins import install


class Probed(Backend):
    """A backend whose probe does what a test asks for; making one is a fault."""

    outcome: Any = "a new run"

    def __init__(self, *, tracking_uri: str = "", api_key: str = "") -> None:
        raise AssertionError("the doctor must not make a backend")

    def write(self, records: Sequence[Record]) -> None:
        """Take nothing."""

    @classmethod
    def probe(cls, **options: Any) -> str:
        """Answer, raise or hang."""
        if isinstance(cls.outcome, BaseException):
            raise cls.outcome
        return str(cls.outcome() if callable(cls.outcome) else cls.outcome)


def probed(monkeypatch: pytest.MonkeyPatch, outcome: Any, **options: Any) -> BackendState:
    """Examine a configuration with one backend whose probe ends like this."""
    monkeypatch.setattr(Probed, "outcome", outcome)
    install(monkeypatch, probed=f"{__name__}:Probed")
    found = examine({"backends": [{"name": "probed", **options}]}, timeout_seconds=0.5)
    return found.backends[0]


def test_destination_of_a_configured_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that can be used says what it would attach to."""
    found = probed(monkeypatch, "run 1 at http://user:s3cr3t@host")
    assert (found.configured, found.state, found.destination) == (True, "ready", "run 1 at http://***@host")


def test_options_are_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the configuration resolves to can be pasted into a bug report."""
    found = probed(monkeypatch, "", tracking_uri="http://u:s3cr3t@h", api_key="s3cr3t")
    assert found.options == {"tracking_uri": "http://***@h", "api_key": "***"}


@pytest.mark.parametrize(
    ("outcome", "state", "reason"),
    [
        (MissingExtraError("probed backend", "probed", "probed"), "not installed", 'pip install "gradtrack[probed]"'),
        (BackendError("http://u:s3cr3t@h is down"), "unreachable", "BackendError: http://***@h is down"),
        (SystemExit(3), "broken", "SystemExit: 3"),
    ],
)
def test_reason_why_a_backend_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, outcome: BaseException, state: str, reason: str
) -> None:
    """What is missing, down or broken is told apart."""
    found = probed(monkeypatch, outcome)
    assert (found.state, found.reason, found.destination) == (state, reason, "")


def test_tracker_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A black hole costs the time limit and no more."""
    never = threading.Event()
    found = probed(monkeypatch, never.wait)
    assert (found.state, found.reason) == ("silent", "no answer within 0.5 seconds")
    never.set()


def test_unknown_option_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that the backend does not have shows before a training does, with the nearest that it has."""
    found = probed(monkeypatch, "", colour=1)
    assert found.state == "broken"
    assert "'colour' is not an option" in found.reason
    (json,) = (one for one in examine({"backends": [{"name": "json", "directry": "x"}]}).backends if one.configured)
    assert json.reason.endswith("Did you mean 'directory'?")


def test_backend_that_is_named_twice_is_told() -> None:
    """The manager would refuse it, and says so in the same words."""
    first = examine({"backends": ["json", {"name": "json", "directory": "x"}]}).backends[0]
    assert (first.name, first.state) == ("json", "broken")
    assert "backend 'json' is named twice" in first.reason


def test_every_installed_backend_is_listed(tmp_path: Path) -> None:
    """Also those that the configuration does not name, after those that it does."""
    found = examine({"backends": ["json", "memory"]})
    assert [one.name for one in found.backends[:2]] == ["json", "memory"]
    assert {one.name for one in found.backends} >= set(registry.backends.builtin())
    assert [one.configured for one in found.backends[:3]] == [True, True, False]
    assert found.healthy
    assert list(tmp_path.iterdir()) == []


def test_run_directory_is_checked_but_not_made(tmp_path: Path) -> None:
    """A directory that could not be written is a finding; one that could is not made."""
    (tmp_path / "file").write_text("")
    bad = examine({"run_dir": tmp_path / "file" / "run"})
    assert "expected a directory that can be written" in bad.run_dir_fault
    assert not bad.healthy
    assert examine({"run_dir": tmp_path / "new" / "run"}).run_dir_fault == ""
    assert not (tmp_path / "new").exists()


def test_configuration_is_resolved(tmp_path: Path) -> None:
    """A file is read as a manager would read it."""
    (tmp_path / "gradtrack.yaml").write_text("gradtrack: {max_grad_norm: 0.5}\nlr: 3\n")
    found = examine(tmp_path / "gradtrack.yaml")
    assert found.config["max_grad_norm"] == 0.5
    assert found.rank == 0
    assert set(found.versions) == {"gradtrack", "torch", "python"}
