"""The OpenTelemetry backend under test, by its real exporter to a collector on the loopback interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradtrack.backends.otel import STEP, OtelBackend, metric_name
from tests.contracts.harness import Harness


class OtelHarness(Harness):
    """Reads the data points that a collector was sent; the step of each is that of its time."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        pytest.importorskip("opentelemetry.sdk", reason='it is not installed: pip install "gradtrack[otel]"')
        from tests.backends.collector import Collector

        self.collector = Collector()

    def open(self) -> OtelBackend:
        return OtelBackend(endpoint=self.collector.endpoint)

    def read(self) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        steps: dict[tuple[str, int], int] = {}
        for metric in self.collector.metrics():
            for point in metric.gauge.data_points if metric.name == STEP else ():
                steps[_row(point)] = point.as_int
        for metric in self.collector.metrics():
            original = metric.description or metric.name
            assert metric_name(original) == metric.name
            for point in metric.gauge.data_points if metric.name != STEP else ():
                found.setdefault(original, []).append((steps[_row(point)], point.as_double))
        return found

    def release(self) -> None:
        self.collector.close()


def _row(point: object) -> tuple[str, int]:
    """Return the pair and the time of a data point."""
    attributes = {one.key: one.value.string_value for one in point.attributes}  # type: ignore[attr-defined]
    return attributes.get("gradtrack.source", ""), point.time_unix_nano  # type: ignore[attr-defined]
