"""Records as OpenTelemetry metrics: pushed to a collector by OTLP, or as values that Prometheus scrapes."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, final
from urllib.parse import urlsplit

from gradtrack._version import __version__
from gradtrack.backends.base import Backend, package_of
from gradtrack.errors import BackendError, ClosedError, PermanentBackendError, UsageError
from gradtrack.records import Record, RunInfo
from gradtrack.support.names import valid_name
from gradtrack.support.redact import redact

STEP: Final = "gradtrack.step"
NONFINITE: Final = "gradtrack.nonfinite"
_SCOPE: Final = "gradtrack"
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./-]{0,254}")
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_./-]")
_LONGEST_NAME: Final = 255
_REFUSED: Final = re.compile(r"\b(?:400|413|422)\b|exceeds max_request_size")
"""What an exporter logs of a batch that would be refused again."""
_WHERE_REFUSED: Final = "Look at what the collector logs; its limits may be too small."
_WHERE_AWAY: Final = "Check that the collector runs, its address and what it allows; the rows are sent again."


@final
class OtelBackend(Backend):
    """A backend for OpenTelemetry, by which rows reach Prometheus and every other store that a collector feeds.

    Each batch of rows is one export by OTLP over HTTP, to `endpoint` or where the environment says, or by an `exporter`
    of the user's: every row is a data point with the time of its step, and `gradtrack.step` is its step. A collector
    that is away gets the batch later. With `meter_provider`, an object or the word `global`, rows are set as values of
    the user's own provider instead; its readers show the last row at the time at which they ask, and its values that
    are not finite only by their number, `gradtrack.nonfinite`.
    """

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        exporter: Any = None,
        meter_provider: Any = None,
        timeout_seconds: float = 5.0,
    ) -> None:
        if sum(option is not None for option in (endpoint, exporter, meter_provider)) > 1:
            raise UsageError("otel: expected one of endpoint, exporter and meter_provider. Leave out the others.")
        if endpoint is not None and not re.match(r"https?://[^/]", str(endpoint)):
            raise UsageError(
                f"otel: endpoint {redact(str(endpoint))!r}: expected an address that begins with http:// or https://. "
                "Write it whole, as in http://localhost:4318/v1/metrics."
            )
        self._run: RunInfo | None = None
        self._closed = False
        self._gauges: dict[str, Any] = {}
        self._meter: Any = None
        self._given = endpoint
        self._endpoint = ""
        self._exporter = exporter
        self._owned = exporter is None
        if meter_provider is not None:
            self._meter = _meter_of(meter_provider)
            return
        self._export = _sdk("opentelemetry.sdk.metrics.export")
        self._resource = _sdk("opentelemetry.sdk.resources").Resource.create()
        self._scope = _sdk("opentelemetry.sdk.util.instrumentation").InstrumentationScope(_SCOPE, __version__)
        if exporter is None:
            otlp = _sdk("opentelemetry.exporter.otlp.proto.http.metric_exporter").OTLPMetricExporter
            self._exporter = otlp(endpoint=endpoint, timeout=timeout_seconds)
            self._endpoint = endpoint or _configured_endpoint()
        elif not isinstance(exporter, self._export.MetricExporter):
            raise UsageError(f"otel: exporter {redact(repr(exporter))}: expected a MetricExporter. Pass an instance.")

    def write(self, records: Sequence[Record]) -> None:
        if self._closed:
            raise ClosedError("otel backend: it is closed. Make a new one for another run.")
        self._run = next((record.run for record in records if record.run is not None), self._run)
        if not records:
            return
        if self._meter is not None:
            for record in records:
                self._set(record)
            return
        with _Complaints(type(self._exporter).__module__) as complaints:
            try:
                result = self._exporter.export(self._metrics_data(records))
            except Exception as fault:
                raise BackendError(f"otel: {type(fault).__name__}: {redact(str(fault))}") from fault
        if result is not self._export.MetricExportResult.SUCCESS:
            reason = redact("; ".join(dict.fromkeys(complaints.texts))) or "the exporter has failed"
            kind = PermanentBackendError if _REFUSED.search(reason) else BackendError
            raise kind(
                f"otel: {redact(self._endpoint) or 'the exporter'} took no row ({reason}): expected it to take all. "
                + (_WHERE_REFUSED if kind is PermanentBackendError else _WHERE_AWAY)
            )

    def flush(self) -> None:
        if self._exporter is not None and not self._closed:
            self._exporter.force_flush()

    def close(self, *, failed: bool = False) -> None:
        if not self._closed:
            self.flush()
            self._closed = True
            if self._exporter is not None and self._owned:
                self._exporter.shutdown()

    def address(self) -> Mapping[str, Any]:
        return {"endpoint": self._endpoint} if self._endpoint else {}

    @classmethod
    def configured(cls) -> Mapping[str, Any]:
        return {"endpoint": _configured_endpoint()}

    @classmethod
    def probe(cls, **options: Any) -> str:
        backend = cls(**options)
        if backend._meter is not None:
            return "the values of a meter provider, which its own readers send or show"
        if not backend._endpoint:
            return f"the given {type(backend._exporter).__name__}"
        parts = urlsplit(backend._endpoint)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            with socket.create_connection((parts.hostname or "", port), timeout=options.get("timeout_seconds", 5.0)):
                return f"metrics by OTLP at {redact(backend._endpoint)}"
        except (OSError, ValueError) as fault:
            raise BackendError(f"otel: {redact(backend._endpoint)} does not answer ({redact(str(fault))})") from fault
        finally:
            backend.close()

    def _attributes(self, record: Record) -> dict[str, str]:
        """Return what tells the rows of this run and this pair from those of others."""
        found = {"gradtrack.run_id": "" if self._run is None else self._run.run_id}
        return {**found, "gradtrack.source": record.source} if record.source else found

    def _set(self, record: Record) -> None:
        """Set the values of a row; the SDK leaves out those that are not finite, and so shows the ones before them."""
        attributes = self._attributes(record)
        values = {name: value for name, value in record.metrics.items() if math.isfinite(value)}
        for name, value in {**values, STEP: record.step, NONFINITE: len(record.metrics) - len(values)}.items():
            if name not in self._gauges:
                mapped = metric_name(name)
                self._gauges[name] = self._meter.create_gauge(mapped, description="" if mapped == name else name)
            self._gauges[name].set(value, attributes)

    def _metrics_data(self, records: Sequence[Record]) -> Any:
        """Return the rows as an exporter takes them: for each metric its points, with the times of their steps."""
        points: dict[str, list[Any]] = {}
        for record in records:
            attributes, at = self._attributes(record), round(record.time * 1e9)
            for name, value in {**record.metrics, STEP: record.step}.items():
                point = self._export.NumberDataPoint(attributes, start_time_unix_nano=0, time_unix_nano=at, value=value)
                points.setdefault(name, []).append(point)
        metrics = [
            self._export.Metric(
                name=(mapped := metric_name(name)),
                description="" if mapped == name else name,
                unit="",
                data=self._export.Gauge(found),
            )
            for name, found in points.items()
        ]
        scope = self._export.ScopeMetrics(scope=self._scope, metrics=metrics, schema_url="")
        resource = self._export.ResourceMetrics(resource=self._resource, scope_metrics=[scope], schema_url="")
        return self._export.MetricsData([resource])


class _Complaints(logging.Filter):
    """Keeps what an exporter logs in this thread, which is told as our own fault, once, instead of at every attempt."""

    def __init__(self, logger: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._logger, self._thread = logging.getLogger(logger), threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        """Take a record of this thread."""
        if record.thread != self._thread:
            return True
        self.texts.append(record.getMessage())
        return False

    def __enter__(self) -> _Complaints:
        self._logger.addFilter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeFilter(self)


def _sdk(name: str) -> Any:
    """Return a module of OpenTelemetry."""
    return package_of(name, package="opentelemetry-sdk", extra="otel")


def _meter_of(provider: Any) -> Any:
    """Return a meter of a provider; one that keeps nothing is refused."""
    found = provider
    if isinstance(provider, str):
        if provider != "global":
            raise UsageError(
                f"otel: meter_provider {redact(provider)!r}: expected 'global' or a MeterProvider. "
                "Write 'global' for the one that the program has set, or pass an instance."
            )
        found = _sdk("opentelemetry.metrics").get_meter_provider()
        if not isinstance(found, _sdk("opentelemetry.sdk.metrics").MeterProvider):
            raise UsageError(
                "otel: meter_provider 'global': expected one that was set. Call "
                "opentelemetry.metrics.set_meter_provider() before the manager is made."
            )
    if not callable(getattr(found, "get_meter", None)):
        raise UsageError(f"otel: meter_provider {redact(repr(provider))}: expected a MeterProvider. Pass an instance.")
    return found.get_meter(_SCOPE, __version__)


def _configured_endpoint() -> str:
    """Return where the environment sends metrics to, as OpenTelemetry reads it."""
    own = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    return own or f"{base.rstrip('/')}/v1/metrics"


def metric_name(name: str) -> str:
    """Return the name under which OpenTelemetry has a metric."""

    def clean(text: str) -> str:
        cleaned = _NOT_IN_NAMES.sub("_", text)
        return cleaned if cleaned[:1].isalpha() else f"m{cleaned}"

    return valid_name(
        name, plain=lambda text: text if _NAME.fullmatch(text) else None, clean=clean, longest=_LONGEST_NAME
    )
