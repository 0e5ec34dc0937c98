"""The doctor says where records would go, and leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradtrack import Alert, GradientManager, registry
from gradtrack.alerts.base import Message
from gradtrack.backends.base import Backend
from gradtrack.delivery.preflight import BackendState, examine
from gradtrack.errors import BackendError, MissingExtraError, UsageError
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


@pytest.mark.parametrize("outcome", [UsageError("it needs an option"), BackendError("it is down")])
def test_backend_that_is_not_named_is_not_configured(monkeypatch: pytest.MonkeyPatch, outcome: BaseException) -> None:
    """Neither broken nor unreachable: what it would lack is told, and is no fault of this configuration."""
    monkeypatch.setattr(Probed, "outcome", outcome)
    install(monkeypatch, probed=f"{__name__}:Probed")
    found = examine({"backends": ["memory"]})
    (other,) = (one for one in found.backends if one.name == "probed")
    assert (other.configured, other.state, str(outcome) in other.reason) == (False, "not configured", True)
    assert found.healthy


class Channel(Alert):
    """An alert that keeps nothing, and tells that it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def send(self, message: Message) -> None:
        """Be posted to, which no examination does."""
        raise AssertionError("the doctor must not post")

    def close(self) -> None:
        """Note the call."""
        self.closed = True


def test_alerts_that_can_be_used_say_what_they_post() -> None:
    """Nothing is posted, the address is not shown, and an alert that the user has made stays open."""
    channel = Channel()
    webhook = {"name": "webhook", "url": "https://host/s3cr3t", "min_severity": "high"}
    found = examine({"alerts": [webhook, channel]})
    assert [(one.name, one.state) for one in found.alerts] == [("webhook", "ready"), ("channel", "ready")]
    assert [one.destination for one in found.alerts] == ["issues of HIGH and above", "issues of MEDIUM and above"]
    assert found.healthy
    assert not channel.closed
    assert "s3cr3t" not in repr(found)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "$NO_SUCH_ADDRESS"}, "in the environment variable NO_SUCH_ADDRESS, which is empty"),
        ({"url": "ftp://host/s3cr3t"}, "expected an address that begins with https://"),
        ({"url": "https://host/s3cr3t", "bdy": "json"}, "Did you mean 'body'?"),
        ({"url": "https://host/s3cr3t", "min_severity": "severe"}, "expected one of INFO"),
    ],
)
def test_alert_that_cannot_be_used_is_found(options: dict[str, Any], reason: str) -> None:
    """What would end the training at its beginning is told before, in the words of the manager, without the address."""
    config = {"alerts": [{"name": "webhook", **options}]}
    found = examine(config)
    assert (found.alerts[0].state, found.healthy) == ("broken", False)
    assert reason in found.alerts[0].reason
    assert "s3cr3t" not in repr(found)
    with pytest.raises(UsageError) as fault:
        GradientManager(config)
    assert str(fault.value) in found.alerts[0].reason


def test_analyzer_that_cannot_be_used_is_found() -> None:
    """An option that it does not have would end the training at its beginning; those that all have are known."""
    found = examine({"analyzers": [{"name": "flow", "every": 5}, {"name": "updates", "evry": 5}]})
    assert [(one.name, one.state) for one in found.analyzers] == [("flow", "ready"), ("updates", "broken")]
    assert "Did you mean 'every'?" in found.analyzers[1].reason
    assert not found.healthy
    assert examine({"analyzers": "auto"}).analyzers == ()


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
