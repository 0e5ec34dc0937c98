"""A server that lets W&B open runs and takes what it sends, until it is stopped."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PROJECT = {"id": "cA==", "name": "faults", "entity": {"id": "ZQ==", "name": "tests"}}


class WandbServer(ThreadingHTTPServer):
    """Answers the questions that W&B asks at a start, and every other request with an empty answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Refuse every connection from now on."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = {"data": _data(json.loads(body))} if self.path.endswith("/graphql") else {}
        content = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _data(request: dict[str, Any]) -> dict[str, Any]:
    query, given = request["query"], request.get("variables") or {}
    if "upsertBucket" in query:
        bucket = {"id": "aWQ=", "name": given.get("name") or "run", "displayName": "a run", "config": "{}"}
        return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": 0, "project": _PROJECT}, "inserted": True}}
    if "createRunFiles" in query:
        files = [{"name": name, "uploadUrl": "/upload"} for name in given.get("files", ())]
        return {"createRunFiles": {"runID": "aWQ=", "uploadHeaders": [], "files": files}}
    if "viewer" in query:
        return {"viewer": {"id": "dQ==", "entity": "tests", "username": "tests", "teams": {"edges": []}}}
    return {"serverInfo": {"features": []}} if "serverInfo" in query else {}
