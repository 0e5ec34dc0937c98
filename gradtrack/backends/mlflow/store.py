"""A store of MLflow as the backend calls it: names, points of metrics, requests that soon fail and show no secret."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import posixpath
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from gradtrack.delivery.destinations import path_readings
from gradtrack.delivery.locks import lock
from gradtrack.errors import BackendError, PermanentBackendError
from gradtrack.support.names import digest_of, valid_name
from gradtrack.support.redact import redact

_logger = logging.getLogger("gradtrack")

_LONGEST_NAME: Final = 250
MOST_METRICS: Final = 1000
_MOST_BYTES: Final = 800_000
_NO_PRINT: Final = "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"
_ONE_AT_A_TIME: Final = threading.Lock()


def metric_name(name: str) -> str:
    """Return the name of a metric in MLflow: itself, or where MLflow refuses it a readable one with a hash of it."""
    return valid_name(name, plain=_plain, clean=_clean, longest=_LONGEST_NAME)


def _plain(name: str) -> str | None:
    usual = re.fullmatch(rf"[/\w.\- ]{{1,{_LONGEST_NAME}}}", name) is not None and name == name.strip()
    leads_elsewhere = posixpath.normpath(name) != name or name in (".", "..") or name.startswith(("/", "../"))
    return name if usual and not leads_elsewhere else None


def _clean(name: str) -> str:
    parts = (part for part in re.sub(r"[^/\w.\- ]", "_", name).split("/") if part not in ("", ".", ".."))
    return posixpath.normpath("/".join(parts)).strip()


class Points:
    """The points that were asked for, by metric: each history is fetched once, and what is written joins it.

    Only a write that failed leaves it open what a run has; then everything is asked for again.
    """

    def __init__(self, fetch: Callable[[str], Iterable[Any]]) -> None:
        self._fetch = fetch
        self._known: dict[str, set[tuple[int, int]]] = {}
        self._in_doubt = False

    def has(self, metric: Any) -> bool:
        """Say whether the run has a point of this metric at its step and time."""
        if metric.key not in self._known:
            self._known[metric.key] = {(point.step, point.timestamp) for point in self._fetch(metric.key)}
        return (metric.step, metric.timestamp) in self._known[metric.key]

    def add(self, metrics: Iterable[Any]) -> None:
        """Note points that were written."""
        for metric in metrics:
            if metric.key in self._known:
                self._known[metric.key].add((metric.step, metric.timestamp))

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Forget everything where a write fails, and again when it has succeeded: a training seldom asks."""
        try:
            yield
        except BaseException:
            self._known.clear()
            self._in_doubt = True
            raise
        if self._in_doubt:
            self._known.clear()
            self._in_doubt = False


class Store:
    """MLflow's client for one tracking address; `run_id` is the run that is written to, where it is known."""

    def __init__(self, mlflow: Any, uri: str, *, run_id: str | None, timeout_seconds: float) -> None:
        self.uri, self.run_id = uri, run_id
        parts = urlsplit(uri)
        secret = "@" in parts.netloc or parts.query
        self.address = (
            urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")) if secret else uri
        )
        """The tracking address without what may be secret in it."""
        self._mlflow, self._timeout_seconds = mlflow, timeout_seconds
        self._told: set[str] = set()

    @cached_property
    def client(self) -> Any:
        """Return MLflow's own client, made when it is first needed; a new store gets its tables then."""
        path = Path(tempfile.gettempdir()) / f"gradtrack-{digest_of(self.uri)}.lock"
        with contextlib.ExitStack() as stack, self._errors():
            with contextlib.suppress(OSError):  # a file of another user
                # MLflow makes the tables of a new store without a lock of its own.
                lock(stack.enter_context(path.open("w")).fileno(), wait=True)
            client = self._mlflow.MlflowClient(tracking_uri=self.uri)
            if self.uri.startswith("sqlite:"):
                client.search_experiments(max_results=1)
        return client

    def check_alive(self) -> None:
        """Fail soon where the server does not answer: MLflow's client would retry for minutes."""
        parts = urlsplit(self.uri)
        if parts.scheme not in ("http", "https"):
            return
        requests = importlib.import_module("requests")
        address = f"{self.address.rstrip('/')}/health"
        try:
            requests.head(address, timeout=self._timeout_seconds, allow_redirects=False)
        except requests.exceptions.SSLError:
            return  # it answers; whether its certificate is accepted is for MLflow's own settings to say
        except requests.exceptions.RequestException as fault:
            raise BackendError(
                f"mlflow: {redact(address)} does not answer ({type(fault).__name__}). "
                "Rows are sent again until it does."
            ) from None

    def call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of MLflow's client."""
        method = getattr(self.client, name)
        with self._errors():
            return method(*arguments, **keywords)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Replace MLflow's errors by ours, as they show the address with its password."""
        try:
            yield
        except Exception as fault:
            raise _error_of(fault, self.run_id) from None

    def tell(self, text: str) -> None:
        """Warn of something once."""
        if text not in self._told:
            self._told.add(text)
            _logger.warning("mlflow: %s", text)

    def log(self, run_id: str, metrics: list[Any]) -> None:
        """Send metrics in one call; where the server refuses one of them, send all the others."""
        try:
            self.call("log_batch", run_id, metrics=metrics, synchronous=True)
        except _RefusedError as fault:
            if self.call("get_run", run_id).info.lifecycle_stage == "deleted":
                raise PermanentBackendError(
                    f"mlflow: run {run_id} was deleted: expected it to take metrics. Restore it with "
                    f"`mlflow runs restore --run-id {run_id}`; `gradtrack replay` then delivers the rest."
                ) from None
            if len(metrics) == 1:
                self.tell(f"metric {metrics[0].key!r} is left out: {fault}")
                return
            middle = len(metrics) // 2
            self.log(run_id, metrics[:middle])
            self.log(run_id, metrics[middle:])

    def end(self, run_id: str, status: str, *, end_time: int | None = None) -> None:
        """End a run; MLflow would print where it is, with the password of the address."""
        with _ONE_AT_A_TIME:
            before = os.environ.get(_NO_PRINT)
            os.environ[_NO_PRINT] = "true"
            try:
                self.call("set_terminated", run_id, status, end_time)
            finally:
                os.environ.pop(_NO_PRINT, None)
                os.environ.update({} if before is None else {_NO_PRINT: before})


class _RefusedError(BackendError):
    """Something in a call was not valid."""


def _error_of(fault: Exception, run_id: str | None) -> BackendError:
    code = str(getattr(fault, "error_code", ""))
    text = redact(str(fault)) or type(fault).__name__
    if code == "RESOURCE_DOES_NOT_EXIST":
        return PermanentBackendError(
            f"mlflow: {text} (run {run_id}): expected a run that exists. Check tracking_uri and run_id."
        )
    if code == "UNAUTHENTICATED" or "error code 401" in text:
        return PermanentBackendError(
            f"mlflow: {text}: expected credentials that the server accepts. Set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN; `gradtrack replay` then delivers the rows."
        )
    if code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
        return _RefusedError(f"mlflow: {text}")
    return BackendError(f"mlflow: {text}")


def batches(rows: Iterable[list[Any]]) -> Iterator[list[Any]]:
    """Group metrics into calls of a size that MLflow takes; a row stays whole unless it is larger than a call."""
    batch: list[Any] = []
    size = 0
    for row in rows:
        for start in range(0, len(row), MOST_METRICS):
            part = row[start : start + MOST_METRICS]
            # A letter beyond ASCII is sent as six characters.
            weight = sum(120 + len(metric.key.encode("ascii", "backslashreplace")) for metric in part)
            if batch and (len(batch) + len(part) > MOST_METRICS or size + weight > _MOST_BYTES):
                yield batch
                batch, size = [], 0
            batch, size = batch + part, size + weight
    if batch:
        yield batch


def absolute(uri: str) -> str:
    """Return an address that means the same after the working directory has changed."""
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////") and ":memory:" not in uri:
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    return uri


def local_paths(uri: str) -> list[str]:
    """Return what an address of a store or of its files may mean on this machine; nothing where it names no path."""
    if uri.startswith("sqlite:///"):
        return path_readings(uri.removeprefix("sqlite:///"))
    parts = urlsplit(uri)
    return path_readings(parts.path) if parts.scheme in ("", "file") and not parts.netloc else []
