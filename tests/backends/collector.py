"""A collector of OpenTelemetry that speaks OTLP over HTTP and keeps what it was sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    """Answers with a list of codes, the last one for ever, and decodes the requests that it accepts."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (  # type: ignore[import-not-found, unused-ignore]
            ExportMetricsServiceRequest,
        )

        self.codes = [200]
        self.requests: list[Any] = []
        self.paths: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                code = outer.codes.pop(0) if len(outer.codes) > 1 else outer.codes[0]
                if code == 200:
                    if self.headers.get("Content-Encoding") == "gzip":
                        body = gzip.decompress(body)
                    outer.paths.append(self.path)
                    outer.requests.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def metrics(self) -> Iterator[Any]:
        """Yield every metric of every request."""
        for request in self.requests:
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    yield from scope.metrics

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
