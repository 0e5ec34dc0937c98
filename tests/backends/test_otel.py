"""Rows reach a collector of OpenTelemetry with the times of their steps, and the readers of the user's own provider."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradtrack import GradientManager
from gradtrack.delivery.journal.reading import find_journals
from gradtrack.delivery.replay import replay
from gradtrack.errors import BackendError, PermanentBackendError, UsageError
from gradtrack.records import Record
from tests.backends.collector import Collector
from tests.backends.conftest import free_port
from tests.backends.rows import make_records
from tests.processes import python
from tests.training import train

sdk: Any = pytest.importorskip("opentelemetry.sdk.metrics", reason='pip install "gradtrack[otel]"')
export: Any = pytest.importorskip("opentelemetry.sdk.metrics.export")

from gradtrack.backends.otel import NONFINITE, STEP, OtelBackend, metric_name  # noqa: E402

NORM = "train/grad_norm"
EVERY_STEP: dict[str, Any] = {"grad_log_every_n_steps": 1, "engine": "torch", "save_gradient_plots": False}


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Give a collector that takes everything."""
    found = Collector()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


def points(collector: Collector, name: str) -> list[Any]:
    """Return the data points of a metric."""
    return [point for metric in collector.metrics() if metric.name == name for point in metric.gauge.data_points]


def journaled(run_dir: Path) -> list[Record]:
    """Return the rows that the journal of a run holds."""
    (journal,) = find_journals(run_dir)
    return [record for _, record in journal.rows()]


def test_every_row_of_a_training_is_a_point_at_its_time(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment names the collector and the service; values, times and steps are those of the journal."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint.removesuffix("/v1/metrics"))
    monkeypatch.setenv("OTEL_SERVICE_NAME", "our-training")
    with GradientManager(backends=["otel"], run_dir=tmp_path / "run", **EVERY_STEP) as manager:
        train(manager, 8, change=lambda step, loss: loss * (math.nan if step == 5 else 1.0))
        run_id = manager.status()["run_id"]
    rows = journaled(tmp_path / "run")
    assert [repr(point.as_double) for point in points(collector, NORM)] == [repr(row.metrics[NORM]) for row in rows]
    assert [point.time_unix_nano for point in points(collector, NORM)] == [round(row.time * 1e9) for row in rows]
    assert [point.as_int for point in points(collector, STEP)] == list(range(1, 9))
    (attribute,) = points(collector, NORM)[0].attributes
    assert (attribute.key, attribute.value.string_value) == ("gradtrack.run_id", run_id)
    resource = collector.requests[0].resource_metrics[0].resource
    named = {one.key: one.value.string_value for one in resource.attributes}
    assert named["service.name"] == "our-training"
    assert set(collector.paths) == {"/v1/metrics"}


def test_a_batch_is_one_request(collector: Collector) -> None:
    """However many rows there are: a collector is not asked for each."""
    OtelBackend(endpoint=collector.endpoint).write(make_records(200))
    assert len(collector.requests) == 1
    assert len(points(collector, NORM)) == 200


def test_a_collector_that_is_away_gets_the_rows_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The training goes on, the fault is told once, not at every attempt, and a replay brings each row once."""
    endpoint = f"http://127.0.0.1:{free_port()}/v1/metrics"
    manager = GradientManager(
        backends=[{"name": "otel", "endpoint": endpoint, "timeout_seconds": 0.2}],
        run_dir=tmp_path / "run",
        close_timeout_seconds=1.0,
        **EVERY_STEP,
    )
    assert len(train(manager, 6)) == 6
    manager.close()
    status = manager.status()["backends"]["otel"]
    assert (status["acknowledged"], status["pending"]) == (0, 6)
    assert "took no row" in status["why"]
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]
    back = Collector()
    try:
        for delivered in (6, 0):
            (done,) = replay(tmp_path / "run", to="otel", options={"endpoint": back.endpoint})
            assert (done.complete, done.delivered) == (True, delivered), done
        assert [point.as_int for point in points(back, STEP)] == [1, 2, 3, 4, 5, 6]
    finally:
        back.close()


def test_a_server_of_a_journal_is_not_sent_to(tmp_path: Path) -> None:
    """A collector elsewhere that only the journal names gets nothing."""
    spec = {"name": "otel", "endpoint": "http://collector.invalid:4318/v1/metrics", "timeout_seconds": 0.1}
    manager = GradientManager(backends=[spec], run_dir=tmp_path / "run", close_timeout_seconds=0.3, **EVERY_STEP)
    train(manager, 2)
    manager.close()
    (done,) = replay(tmp_path / "run")
    assert "names the server" in (done.fault or "")


@pytest.mark.parametrize(("code", "kind"), [(400, PermanentBackendError), (401, BackendError), (404, BackendError)])
def test_an_answer_says_whether_to_try_again(code: int, kind: type[Exception], collector: Collector) -> None:
    """What the collector cannot read will never do; what it does not allow may be allowed later."""
    collector.codes = [code]
    backend = OtelBackend(endpoint=collector.endpoint)
    remedy = "Look at what the collector logs" if kind is PermanentBackendError else "Check that the collector runs"
    with pytest.raises(BackendError, match=rf"{code}.*: expected .*\. {remedy}") as caught:
        backend.write(make_records(2))
    assert type(caught.value) is kind
    collector.codes = [200]
    backend.write(make_records(2))
    backend.close()
    assert len(points(collector, NORM)) == 2


def test_a_password_is_told_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an error nor the address that a journal keeps has it in clear."""
    backend = OtelBackend(endpoint=f"http://me:SECRET@127.0.0.1:{free_port()}/v1/metrics", timeout_seconds=0.1)
    with pytest.raises(BackendError) as caught:
        backend.write(make_records(1))
    assert "SECRET" not in str(caught.value)


def test_logs_of_others_are_left_alone(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    """Only what the exporter logs for us, in our thread, is taken; afterwards its logger is as it was."""
    logger = logging.getLogger("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    before = list(logger.filters)
    OtelBackend(endpoint=collector.endpoint).write(make_records(1))
    logger.warning("still heard")
    assert list(logger.filters) == before
    assert "still heard" in caplog.text


def read(reader: Any) -> dict[str, tuple[float, dict[str, str]]]:
    """Return the value and the attributes of each metric that a reader of the SDK collects."""
    found = {}
    for resource in reader.get_metrics_data().resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                (point,) = metric.data.data_points
                found[metric.description or metric.name] = (point.value, dict(point.attributes))
    return found


def test_the_readers_of_a_provider_see_the_last_row() -> None:
    """As Prometheus does at a scrape: values of the last step, its number, and the run."""
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader])
    with GradientManager(backends=[{"name": "otel", "meter_provider": provider}], **EVERY_STEP) as manager:
        reports = train(manager, 3)
        manager.flush()
        found = read(reader)
        assert found[NORM][0] == reports[-1].metrics()[NORM]
        step, attributes = found[STEP]
        assert step == 3
        assert attributes == {"gradtrack.run_id": manager.status()["run_id"]}
    provider.shutdown()


def test_the_provider_that_is_set_for_the_process_is_found() -> None:
    """By a word, which fits into a configuration file."""
    code = """
import gradtrack.backends.otel as otel
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tests.backends.rows import make_records

reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
otel.OtelBackend(meter_provider="global").write(make_records(2))
print(reader.get_metrics_data().resource_metrics[0].scope_metrics[0].scope.name)
"""
    done = python("-c", code)
    assert done.stdout == "gradtrack\n", done.stderr


def test_a_provider_gets_hostile_names_and_what_is_finite(caplog: pytest.LogCaptureFixture) -> None:
    """A name that OpenTelemetry refuses is mapped, and told in the description; the rest is counted."""
    from tests.contracts.test_backends import HOSTILE

    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader])
    values = {name: float(at) for at, name in enumerate(HOSTILE)}
    lost = {"a": math.inf, "b": math.nan, "c": -math.inf}
    backend = OtelBackend(meter_provider=provider)
    backend.write([Record(step=1, time=1.0, metrics={**values, **lost})])
    found = {name: value for name, (value, _) in read(reader).items()}
    assert found == {**values, STEP: 1, NONFINITE: 3}
    backend.write([Record(step=2, time=2.0, metrics=values)])
    assert read(reader)[NONFINITE][0] == 0
    assert caplog.text == ""
    provider.shutdown()


def test_an_exporter_of_the_users_is_used_and_left_open() -> None:
    """Such as the one for gRPC; here the SDK's own that prints."""
    stream = io.StringIO()
    exporter = export.ConsoleMetricExporter(out=stream)
    backend = OtelBackend(exporter=exporter)
    backend.write(make_records(2))
    backend.close()
    assert '"name": "train/grad_norm"' in stream.getvalue()
    assert OtelBackend.probe(exporter=exporter) == "the given ConsoleMetricExporter"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"endpoint": "localhost:4318"}, "begins with http://"),
        ({"endpoint": 3}, "begins with http://"),
        ({"exporter": 3}, "expected a MetricExporter"),
        ({"meter_provider": 3}, "expected a MeterProvider"),
        ({"meter_provider": "ours"}, "expected 'global' or a MeterProvider. Write 'global' for the one"),
        ({"meter_provider": "global"}, r"Call opentelemetry.metrics.set_meter_provider\(\)"),
        ({"meter_provider": object(), "endpoint": "http://x"}, "expected one of"),
    ],
)
def test_options_that_cannot_mean_anything_are_refused(options: dict[str, Any], text: str) -> None:
    """The error comes when the manager is made, and says what to do."""
    with pytest.raises(UsageError, match=text):
        GradientManager(backends=[{"name": "otel", **options}])


def test_the_doctor_looks_whether_a_collector_listens(collector: Collector) -> None:
    """It sends nothing."""
    assert OtelBackend.probe(endpoint=collector.endpoint) == f"metrics by OTLP at {collector.endpoint}"
    assert collector.requests == []
    with pytest.raises(BackendError, match="does not answer"):
        OtelBackend.probe(endpoint=f"http://127.0.0.1:{free_port()}/v1/metrics")


@pytest.mark.parametrize("name", ["", "9lives", "_x", "a b", "ä", "x" * 300])
def test_names_are_those_that_an_instrument_may_have(name: str) -> None:
    """They begin with a letter and are short."""
    sdk.MeterProvider().get_meter("m").create_gauge(metric_name(name))
    assert metric_name(name)[0].isalpha()
