"""What every alert promises, posted to a real server: issues arrive, and no fault reaches a training."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from gradtrack import Alert, GradientConfig, GradientManager, Issue, IssueSeverity, IssueType, registry
from gradtrack.alerts.base import Message
from gradtrack.delivery.worker import AlertWorker
from gradtrack.errors import ConfigError, GradtrackError, InputTypeError, PermanentBackendError, PluginError, UsageError
from tests.training import optimizer_of, small_model, train

KEY = "T0SECRET/B0SECRET/x9SECRETx9"
WAIT_SECONDS = 20.0


class Server:
    """A server that answers with a list of codes, the last one for ever.

    None is no answer at all, 0 one that never ends, and 1 one that is no HTTP and repeats what it was sent.
    """

    def __init__(self) -> None:
        self.codes: list[int | None] = [200]
        self.bodies: list[Any] = []
        self.requests: list[str] = []
        self.credentials: list[str | None] = []
        self.location = "/elsewhere"
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.requests.append(f"{self.command} {self.path}")
                outer.credentials.append(self.headers["Authorization"])
                body = self.rfile.read(int(self.headers["Content-Length"]))
                code = outer.codes.pop(0) if len(outer.codes) > 1 else outer.codes[0]
                if code is None:
                    outer.released.wait(WAIT_SECONDS)
                    return
                if code == 0:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
                    while not outer.released.wait(0.02):
                        self.wfile.write(b"x")
                    return
                if code == 1:
                    self.wfile.write(f"{self.path} {self.headers}".encode())
                    return
                if code == 200:
                    outer.bodies.append(json.loads(body, parse_constant=lambda word: pytest.fail(word)))
                self.send_response(code)
                if 300 <= code < 400:
                    self.send_header("Location", outer.location)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Return an address whose path is a secret, as Slack's is."""
        return f"http://127.0.0.1:{self.port}/services/{KEY}"

    def close(self) -> None:
        """Stop answering."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


OPTIONS: dict[str, Callable[[Server], dict[str, Any]]] = {
    "webhook": lambda server: {"url": server.url, "timeout_seconds": 5.0}
}
"""The options with which each alert posts to the server."""


@pytest.fixture
def server() -> Iterator[Server]:
    """Give a server that takes what is posted."""
    found = Server()
    yield found
    found.close()


@pytest.fixture(params=registry.alerts.builtin())
def spec(request: pytest.FixtureRequest, server: Server) -> dict[str, Any]:
    """Give the setting of each alert that the registry finds."""
    assert request.param in OPTIONS, f"alert {request.param!r} has no options here: add them to OPTIONS"
    return {"name": request.param, **OPTIONS[request.param](server)}


def spoilt(step: int, loss: Any) -> Any:
    """Make the loss of the third step NaN, at which an issue opens."""
    return loss * math.nan if step == 3 else loss


def run(spec: Any, steps: int = 6, **settings: Any) -> dict[str, Any]:
    """Train with one issue, and return the status of the alerts after the close."""
    manager = GradientManager(alerts=[spec], engine="torch", **settings)
    train(manager, steps, change=spoilt)
    manager.close()
    found: dict[str, Any] = manager.status()["alerts"]
    return found


def test_an_issue_is_posted_when_it_opens(spec: dict[str, Any], server: Server) -> None:
    """It comes once, with type, severity, run and step, though it stays open for steps."""
    (status,) = run(spec).values()
    assert [status[name] for name in ("sent", "pending", "lost", "faults")] == [1, 0, 0, 0]
    (body,) = server.bodies
    assert all(part in body["text"] for part in ("NUMERICAL", "step 3", "CRITICAL"))
    assert server.requests == [f"POST /services/{KEY}"]


def test_a_server_that_is_back_gets_the_issue_once(spec: dict[str, Any], server: Server) -> None:
    """What it refuses for a while is tried again."""
    server.codes = [500, 429, 200]
    (status,) = run(spec).values()
    assert (status["sent"], status["lost"], status["faults"]) == (1, 0, 2)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("code", [403, 404, 302])
def test_a_refusal_for_good_is_counted(
    code: int, spec: dict[str, Any], server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """An issue that the server will never take is tried once, logged without the address, and lost."""
    server.codes = [code]
    (status,) = run(spec).values()
    assert (status["sent"], status["lost"], status["faults"], len(server.requests)) == (0, 1, 1, 1)
    assert str(code) in status["last_fault"]
    assert "SECRET" not in caplog.text + str(status)


@pytest.mark.parametrize("place", ["/elsewhere", "http://169.254.169.254/", "file:///etc/passwd", "ftp://host/x"])
def test_no_redirect_is_followed(place: str, spec: dict[str, Any], server: Server) -> None:
    """Neither to a file nor to another server, which would get the issue."""
    server.codes, server.location = [307], place
    (status,) = run(spec).values()
    assert (status["sent"], status["lost"], len(server.requests)) == (0, 1, 1)


def test_a_password_in_the_address_is_sent_and_shown_nowhere(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """It goes to the server as a header, and no fault tells it, whatever the server answers."""
    host = server.url.partition("//")[2]
    spec = {"name": "webhook", "url": f"http://me:SECRET%20word@{host}"}
    assert run(spec)["webhook"]["sent"] == 1
    assert server.credentials == ["Basic bWU6U0VDUkVUIHdvcmQ="]
    server.codes = [1]
    found = [run(spec, close_timeout_seconds=1.0)]
    server.close()
    for url in (spec["url"], "http://me:SECRET@127.0.0.1", "http://me:SECRET@[::1]", "http://me:SECRET@host.invalid/"):
        found.append(run({**spec, "url": url}, close_timeout_seconds=0.5))
    assert all(one["webhook"]["lost"] == 1 for one in found)
    assert not any(part in caplog.text + str(found) for part in ("SECRET", "bWU6"))


@pytest.mark.parametrize("code", [None, 0])
def test_a_server_that_never_ends_its_answer_holds_up_nothing(
    code: int | None, spec: dict[str, Any], server: Server
) -> None:
    """Steps go on, and the close ends at its deadline, also where a byte comes again and again."""
    server.codes = [code]
    begin = time.monotonic()
    (status,) = run(spec, close_timeout_seconds=0.5).values()
    assert time.monotonic() - begin < WAIT_SECONDS / 2
    assert (status["sent"], status["lost"]) == (0, 1)


def test_a_dead_server_raises_nothing(spec: dict[str, Any], server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The issue is lost when the run ends, and the fault is told once, without the address."""
    server.close()
    (status,) = run(spec, close_timeout_seconds=1.5).values()
    assert (status["sent"], status["lost"]) == (0, 1)
    assert status["faults"] >= 2
    assert sum("it is tried again" in text for text in caplog.messages) == 1
    assert "SECRET" not in caplog.text + str(status)


@pytest.mark.parametrize("kept", [True, False])
def test_what_was_not_posted_is_told_at_the_end(
    kept: bool, spec: dict[str, Any], server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One last line has the number, the issues with their steps, why, and where they can be read."""
    server.codes = [503]
    run(spec, close_timeout_seconds=1.0, run_dir=tmp_path / "run" if kept else None)
    place = f"gradtrack show {tmp_path / 'run'}" if kept else "manager.diagnose()"
    (told,) = (text for text in caplog.messages if "not posted" in text)
    name = spec["name"]
    why = "BackendError: the server answered 503 Service Unavailable"
    assert told == f"alert {name}: 1 of 1 issue was not posted (NUMERICAL at step 3): {why}. {place} has them"


def test_only_the_first_issues_that_were_not_posted_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """The last line stays one line; a close without a lost issue says nothing."""

    class Refused(Odd):
        def send(self, message: Message) -> None:
            raise PermanentBackendError("no")

    worker = AlertWorker("refused", Refused(), IssueSeverity.LOW)
    for _ in range(7):
        worker.post(message())
    worker.ask_close(time.monotonic() + WAIT_SECONDS)
    worker.join(time.monotonic() + WAIT_SECONDS)
    assert "7 of 7 issues were not posted" in caplog.messages[-1]
    assert "2 more)" in caplog.messages[-1]
    caplog.clear()
    well = AlertWorker("odd", Odd(), IssueSeverity.LOW)
    well.post(message())
    well.ask_close(time.monotonic() + WAIT_SECONDS)
    well.join(time.monotonic() + WAIT_SECONDS)
    assert not caplog.messages


def test_the_address_is_written_nowhere(
    spec: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither files of the run nor texts of the manager have it."""
    with GradientManager(
        alerts=[spec],
        engine="torch",
        run_dir=tmp_path,
        grad_log_every_n_steps=1,
        save_html_report=True,
        backends=["json"],
    ) as manager:
        reports = train(manager, 4, change=spoilt)
        manager.save_training_log(tmp_path / "log.json")
        shown = [repr(manager.config), str(manager.status()), repr(reports[-1]), str(manager.get_training_summary())]
    written = [path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert "SECRET" not in "".join([*shown, *written, *capfd.readouterr()])
    assert any('"alerts"' in text and spec["name"] in text for text in written)


def test_a_callback_that_stops_the_training_comes_after_the_post(spec: dict[str, Any], server: Server) -> None:
    """The issue that ends a training is posted as well."""

    def stop(*_: Any) -> None:
        raise RuntimeError("enough")

    manager = GradientManager(alerts=[spec], engine="torch")
    manager.on_issue(stop)
    with pytest.raises(RuntimeError, match="enough"):
        train(manager, 4, change=spoilt)
    manager.close(failed=True)
    assert len(server.bodies) == 1


def test_only_rank_0_posts(spec: dict[str, Any], server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank has the same issues, and one of them is enough."""
    monkeypatch.setenv("RANK", "1")
    assert run(spec) == {}
    assert not server.requests


@pytest.mark.parametrize(("least", "count"), [("CRITICAL", 1), ("critical", 1), (IssueSeverity.HIGH, 1)])
def test_the_least_severity_is_a_setting(least: Any, count: int, spec: dict[str, Any], server: Server) -> None:
    """Issues below it are not posted."""
    run({**spec, "min_severity": least})
    assert len(server.bodies) == count


def test_two_of_one_kind_each_get_the_issue(spec: dict[str, Any], server: Server) -> None:
    """A second one has a number, and a manager that is collected or left open posts too."""
    manager = GradientManager(alerts=[spec, {**spec, "min_severity": "LOW"}], engine="torch")
    train(manager, 4, change=spoilt)
    manager.close()
    manager.close()
    name = spec["name"]
    assert {key: one["sent"] for key, one in manager.status()["alerts"].items()} == {name: 1, f"{name}_2": 1}


def test_the_webhook_has_all_fields_where_it_is_asked_to(server: Server) -> None:
    """With `body: json` a program gets the issue as data; numbers that JSON has no form for are words."""
    run({"name": "webhook", "url": server.url, "body": "json"})
    (body,) = server.bodies
    assert body["issue"]["issue_type"] == "NUMERICAL"
    assert (body["step"], body["source"]) == (3, "")
    assert body["run_id"] in body["text"]


def test_a_text_for_slack_has_neither_links_nor_mentions(server: Server) -> None:
    """What a layer is called is shown as it is."""
    worker = AlertWorker("webhook", registry.alerts.load("webhook")(url=server.url), IssueSeverity.LOW)
    worker.post(message(layer="<!channel> & <http://x>"))
    worker.ask_close(time.monotonic() + WAIT_SECONDS)
    worker.join(time.monotonic() + WAIT_SECONDS)
    assert "at &lt;!channel&gt; &amp; &lt;http://x&gt;" in server.bodies[0]["text"]


def test_the_address_may_come_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that is kept under version control needs no secret."""
    monkeypatch.setenv("OUR_CHANNEL", server.url)
    run({"name": "webhook", "url": "${OUR_CHANNEL}"})
    monkeypatch.setenv("GRADTRACK_WEBHOOK_URL", server.url)
    run("webhook")
    assert len(server.bodies) == 2
    monkeypatch.delenv("GRADTRACK_WEBHOOK_URL")
    with pytest.raises(UsageError, match="GRADTRACK_WEBHOOK_URL, which is empty"):
        GradientManager(alerts=["webhook"])


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ([{"name": "webhok", "url": KEY}], "Did you mean 'webhook'"),
        ([{"name": "webhook", "urll": KEY}], "Did you mean 'url'"),
        ([{"name": "webhook", "url": f"ftp://host/{KEY}"}], "begins with https://"),
        ([{"name": "webhook", "url": f"https://host/{KEY}\n"}], "begins with https://"),
        ([{"name": "webhook", "url": 3}], "begins with https://"),
        ([{"name": "webhook", "url": "https://host", "body": "xml"}], "expected 'slack' or 'json'"),
        ([{"name": "webhook", "url": "https://host", "min_severity": "severe"}], "expected one of INFO"),
        ([{"url": KEY}], "expected a 'name'"),
        ({"name": "webhook", "url": KEY}, "expected a list"),
        ([[KEY]], "expected a name, a mapping"),
        ([object()], r"expected a gradtrack\.Alert"),
    ],
)
def test_a_mistake_is_told_without_secrets(setting: Any, text: str) -> None:
    """Each is refused before the training, with what to write."""
    with pytest.raises(GradtrackError, match=text) as found:
        GradientManager(alerts=setting)
    assert "SECRET" not in str(found.value)


def test_a_setting_that_pydantic_refuses_shows_no_secret() -> None:
    """The other settings may be wrong as well."""
    with pytest.raises(ConfigError) as found:
        GradientConfig(alerts=[{"name": "webhok", "url": KEY}], max_grad_norm=-1)
    assert "SECRET" not in str(found.value)


def message(layer: str = "encoder") -> Message:
    """Return the message of an issue."""
    issue = Issue(
        issue_type=IssueType.EXPLODING,
        severity=IssueSeverity.HIGH,
        layer=layer,
        message="jumped",
        statistic="jump",
        value=math.inf,
        threshold=1.0,
        step=1,
        recommendation="Lower it.",
    )
    return Message(run_id="a-run", run_dir=None, source="critic", step=7, time=1.0, issue=issue.model_dump(mode="json"))


def test_a_message_says_what_where_and_what_to_do() -> None:
    """In words for a person."""
    assert message().text == "HIGH EXPLODING at encoder: jumped\nLower it.\nRun a-run, step 7 of critic"


class Odd(Alert):
    """An alert of another package that does what its author did not mean."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.sent, self.closed = fault, list[Message](), threading.Event()

    def send(self, message: Message) -> None:
        """Leave the interpreter, or keep the message."""
        if self.fault == "exit":
            raise SystemExit(3)
        if self.fault == "fault":
            raise ValueError("https://user:SECRET@host/x")
        self.sent.append(message)

    def close(self) -> None:
        """Say so once, and break."""
        assert not self.closed.is_set()
        self.closed.set()
        if self.fault:
            raise RuntimeError("closing")

    def hide(self, text: str) -> str:
        """Break as well."""
        if self.fault == "exit":
            raise RuntimeError("hiding")
        return super().hide(text)


@pytest.mark.parametrize("fault", ["", "exit", "fault"])
def test_an_alert_of_ones_own_never_raises(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """An instance works as a name does, and its faults are counted."""
    alert = Odd(fault)
    (status,) = run(alert, close_timeout_seconds=1.0).values()
    assert (len(alert.sent), status["sent"], status["lost"]) == ((0, 0, 1) if fault else (1, 1, 0))
    assert alert.closed.wait(WAIT_SECONDS)
    assert (status["faults"] > 1) is bool(fault)
    assert "SECRET" not in caplog.text + str(status)


def test_another_package_adds_an_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry points of `gradtrack.alerts` are names of settings; what is no alert is told."""
    points = [
        EntryPoint("odd", f"{__name__}:Odd", "gradtrack.alerts"),
        EntryPoint("none", f"{__name__}:Server", "gradtrack.alerts"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "gradtrack.alerts" else [])
    monkeypatch.setattr(registry.alerts, "_loaded", {})
    assert run({"name": "odd"})["odd"]["sent"] == 1
    with pytest.raises(PluginError, match=r"has no method 'send': expected send\(self, message\)"):
        GradientManager(alerts=["none"])
    with pytest.raises(InputTypeError):
        GradientManager(alerts=[3])


def test_a_queue_that_is_full_loses_the_newest() -> None:
    """A server that is slower than issues open never holds more than so many in memory."""
    release = threading.Event()

    class Slow(Odd):
        def send(self, message: Message) -> None:
            release.wait(WAIT_SECONDS)
            super().send(message)

    alert = Slow()
    worker = AlertWorker("slow", alert, IssueSeverity.LOW)
    for _ in range(300):
        worker.post(message())
    assert worker.pending <= 256
    release.set()
    end = time.monotonic() + WAIT_SECONDS
    worker.ask_close(end)
    worker.join(end)
    assert len(alert.sent) == worker.sent == 300 - worker.lost
    assert worker.lost == 300 - 256
    worker.post(message())
    assert (worker.pending, worker.lost) == (0, 300 - 256 + 1)


def test_without_an_issue_no_thread_begins(spec: dict[str, Any], server: Server) -> None:
    """Alerts cost a training nothing."""
    manager, model = GradientManager(alerts=[spec], engine="torch", max_grad_norm=1.0), small_model()
    train(manager, 4, model=model, optimizer=optimizer_of(model, lr=0.01))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gradtrack-alert")]
    manager.close()
    assert not server.requests
