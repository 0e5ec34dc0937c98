"""Records as MLflow metrics, in the user's active run or in a run of their own."""

from __future__ import annotations

import html
import importlib
import json
import logging
import math
import os
import posixpath
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, final
from urllib.parse import urlsplit, urlunsplit

from gradtrack.backends.base import Backend
from gradtrack.errors import BackendError, ClosedError, MissingExtraError, PermanentBackendError, UsageError
from gradtrack.record.leavings import files_to_show
from gradtrack.record.naming import HASH_LENGTH, digest_of, valid_name
from gradtrack.records import Panel, Record, RunInfo
from gradtrack.redact import redact

Nonfinite = Literal["keep", "count"]
NONFINITE: Final = "gradtrack/nonfinite"
_RUN_TAG: Final = "gradtrack.run_id"
_OWNER_TAG: Final = "gradtrack.owner"
_MOST_METRICS: Final = 1000
_MOST_BYTES: Final = 800_000
_LONGEST_NAME: Final = 250
_VIEWS_SINCE: Final = (3, 15)
_logger = logging.getLogger("gradtrack")
_T = TypeVar("_T")


@final
class MlflowBackend(Backend):
    """A backend for MLflow that sends many steps in one call and each of them once.

    It writes to the run `run_id`, else to the run that is active where it is made, else to a run of its own in
    `experiment`, which it makes at the first record and ends. Writing a row again changes nothing, because time, step
    and value are part of its identity. `nonfinite="count"` is for servers before 3.16, which cannot show NaN: it leaves
    such values out and counts them. `saved_view=True` adds the panels to the experiment's saved views. In a training a
    process of its own does the work, unless `own_process=False`; `owner` is how it knows the run that it made itself.
    """

    def __init__(
        self,
        *,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        nonfinite: Nonfinite = "keep",
        saved_view: bool = False,
        timeout_seconds: float = 5.0,
        own_process: bool = True,
        owner: str | None = None,
    ) -> None:
        if nonfinite not in ("keep", "count"):
            raise UsageError(f"mlflow: nonfinite {nonfinite!r}: expected 'keep' or 'count'.")
        self._mlflow = _import_mlflow()
        active = self._mlflow.active_run() if run_id is None and experiment is None else None
        self._uri = _absolute(tracking_uri or self._mlflow.get_tracking_uri())
        self._run_id: str | None = active.info.run_id if active is not None else run_id
        # What MLflow itself would take for the next run; asking it for the number would call the server.
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        self._experiment_id = None if self._experiment else os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        self._run_name, self._nonfinite, self._saved_view = run_name, nonfinite, saved_view
        self._timeout_seconds = timeout_seconds
        self._own_process = own_process
        self._owner = owner or uuid.uuid4().hex
        self._owned = self._closed = False
        self._known_client: Any = None
        self._run: RunInfo | None = None
        self._panels: list[Panel] = []
        self._files: dict[str, None] = {}
        self._names: dict[str, str] = {}
        self._told: set[str] = set()

    @property
    def run_id(self) -> str | None:
        """Return the identity of the MLflow run, or None before a run of our own is made."""
        return self._run_id

    def write(self, records: Sequence[Record]) -> None:
        if self._closed:
            raise ClosedError("mlflow backend: it is closed. Make a new one for another run.")
        if not records:
            return
        for record in records:
            self._run = record.run or self._run
            self._panels += [panel for panel in record.panels if panel not in self._panels]
            self._files.update(dict.fromkeys(record.files))
        self._check_alive()
        run_id = self._ensure_run()
        known = len(self._names)
        for metrics in _batches(self._metrics(record) for record in records):
            self._send(run_id, metrics)
        if len(self._names) > known:
            self._after_new_names(run_id, dict(list(self._names.items())[known:]))

    def close(self, *, failed: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        files = files_to_show(self._run, self._files)
        if self._run_id is None or not (self._owned or files):
            return
        self._check_alive()
        try:
            for path in files:
                self._call(self._client.log_artifact, self._run_id, str(path), "gradtrack")
        finally:
            if self._owned:
                self._call(self._client.set_terminated, self._run_id, "FAILED" if failed else "FINISHED")

    def address(self) -> dict[str, Any]:
        found: dict[str, Any] = {"tracking_uri": _without_secrets(self._uri)}
        if self._run_id is not None:
            found["run_id"] = self._run_id
        elif self._experiment is not None:
            found["experiment"] = self._experiment
        if self._nonfinite != "keep":
            found["nonfinite"] = self._nonfinite
        return found

    def prepare(self) -> None:
        self._check_alive()
        self._call(self._client.search_experiments, max_results=1)  # a new store gets its tables now

    def portable(self) -> Mapping[str, Any] | None:
        if not self._own_process:
            return None
        return {
            "run_id": self._run_id,
            "tracking_uri": self._uri,
            "experiment": self._experiment,
            "run_name": self._run_name,
            "nonfinite": self._nonfinite,
            "saved_view": self._saved_view,
            "timeout_seconds": self._timeout_seconds,
            "owner": self._owner,
        }

    def moved(self, address: Mapping[str, Any]) -> None:
        self._run_id = address.get("run_id", self._run_id)

    @classmethod
    def probe(cls, **options: Any) -> str:
        backend = cls(**options)
        backend._check_alive()
        place = _without_secrets(backend._uri)
        if backend._run_id is None:
            return f"a new run at {place}"
        run = backend._call(backend._client.get_run, backend._run_id)
        return f"run {backend._run_id} ({run.info.status.lower()}) at {place}"

    def present(self, records: Sequence[Record]) -> set[tuple[str, int]] | None:
        self._run = next((record.run for record in records if record.run is not None), self._run)
        self._check_alive()
        if self._run_id is None:
            found = self._find_run()
            if found is None:
                return set()
            self._adopt(found)
        # A row of so many metrics goes in several calls, so none of its metrics stands for all of them.
        waiting = {_key(record): self._metrics(record) for record in records}
        waiting = {key: metrics for key, metrics in waiting.items() if 0 < len(metrics) <= _MOST_METRICS}
        there: set[tuple[str, int]] = set()
        while waiting:
            names = Counter(metric.key for metrics in waiting.values() for metric in metrics)
            name = names.most_common(1)[0][0]
            history = self._call(self._client.get_metric_history, self._run_id, name)
            stored = {(point.step, point.timestamp) for point in history}
            for key, metrics in list(waiting.items()):
                for metric in metrics:
                    if metric.key == name:
                        del waiting[key]
                        if (metric.step, metric.timestamp) in stored:
                            there.add(key)
        return there

    @property
    def _client(self) -> Any:
        if self._known_client is None:
            self._known_client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        return self._known_client

    def _metrics(self, record: Record) -> list[Any]:
        """Return the metrics of a record as MLflow takes them."""
        values = dict(record.metrics)
        if self._nonfinite == "count":
            finite = {name: value for name, value in values.items() if math.isfinite(value)}
            dropped = len(values) - len(finite)
            values = {**finite, NONFINITE: float(dropped)} if dropped else finite
        timestamp = round(record.time * 1000)
        metric = self._mlflow.entities.Metric
        return [metric(self._name(name), value, timestamp, record.step) for name, value in values.items()]

    def _name(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = metric_name(name)
        return self._names[name]

    def _send(self, run_id: str, metrics: list[Any]) -> None:
        """Send metrics in one call; where the server refuses one of them, send all the others."""
        try:
            self._call(self._client.log_batch, run_id, metrics=metrics, synchronous=True)
        except _RefusedError as fault:
            self._check_run(run_id)
            if len(metrics) == 1:
                self._tell(f"metric {metrics[0].key!r} is left out: {fault}")
                return
            middle = len(metrics) // 2
            self._send(run_id, metrics[:middle])
            self._send(run_id, metrics[middle:])

    def _check_run(self, run_id: str) -> None:
        run = self._call(self._client.get_run, run_id)
        if run.info.lifecycle_stage == "deleted":
            raise PermanentBackendError(
                f"mlflow: run {run_id} was deleted: expected it to take metrics. Restore it with "
                f"`mlflow runs restore --run-id {run_id}`; `gradtrack replay` then delivers the rest."
            )

    def _ensure_run(self) -> str:
        if self._run_id is None:
            found = self._find_run()
            self._adopt(found if found is not None else self._create_run())
        assert self._run_id is not None
        return self._run_id

    def _adopt(self, run: Any) -> None:
        self._run_id, self._experiment_id = run.info.run_id, run.info.experiment_id
        # A run whose creation succeeded although its answer was lost is ours as well.
        self._owned = run.data.tags.get(_OWNER_TAG) == self._owner

    def _find_run(self) -> Any:
        """Find our run of this training, which another process, or a call without an answer, may have made."""
        if self._run is None:
            return None
        query = f"tags.`{_RUN_TAG}` = '{_tag_of(self._run)}'"
        found = self._call(self._client.search_runs, [self._ensure_experiment()], query, max_results=1)
        return found[0] if found else None

    def _create_run(self) -> Any:
        identity = "" if self._run is None else self._run.run_id
        note = f"Gradients of a training, recorded by gradtrack as run `{html.escape(identity)}`."
        tags = {_RUN_TAG: _tag_of(self._run), _OWNER_TAG: self._owner, "mlflow.note.content": note}
        name = self._run_name or f"gradtrack-{identity}"
        run = self._call(self._client.create_run, self._ensure_experiment(), run_name=name, tags=tags)
        if self._run is not None:
            param = self._mlflow.entities.Param
            params = [param(f"gradtrack/{key}", redact(str(value))) for key, value in self._run.config.items()]
            self._call(self._client.log_batch, run.info.run_id, params=params, synchronous=True)
        return run

    def _ensure_experiment(self) -> str:
        if self._experiment_id is None:
            found = self._call(self._client.get_experiment_by_name, self._experiment)
            if found is not None:
                self._experiment_id = found.experiment_id
            else:
                self._experiment_id = self._call(self._client.create_experiment, self._experiment)
        assert self._experiment_id is not None
        return self._experiment_id

    def _after_new_names(self, run_id: str, names: dict[str, str]) -> None:
        """Keep the names that MLflow cannot hold as tags, and show the new metrics in the saved view."""
        tag = self._mlflow.entities.RunTag
        tags = [
            tag(f"gradtrack.name.{mapped[-HASH_LENGTH:]}", name) for name, mapped in names.items() if mapped != name
        ]
        for start in range(0, len(tags), 100):
            self._call(self._client.log_batch, run_id, tags=tags[start : start + 100], synchronous=True)
        if self._saved_view and self._panels:
            self._save_view(run_id)

    def _save_view(self, run_id: str) -> None:
        """Save the panels as a view of the experiment; the format is MLflow's own, so a failure only costs the view."""
        try:
            version = tuple(int(part) for part in self._mlflow.__version__.split(".")[:2])
            if version < _VIEWS_SINCE:
                return
            experiment_id = self._client.get_run(run_id).info.experiment_id
            key, value = saved_view(self._panels, self._names, round((self._run.created if self._run else 0) * 1000))
            self._client.set_experiment_tag(experiment_id, key, value)
        except Exception as fault:
            self._tell(f"the saved view could not be written: {redact(str(fault))}")

    def _check_alive(self) -> None:
        """Fail soon where the server does not answer: MLflow's client would retry for minutes."""
        parts = urlsplit(self._uri)
        if parts.scheme not in ("http", "https"):
            return
        requests = importlib.import_module("requests")
        address = f"{_without_secrets(self._uri).rstrip('/')}/health"
        try:
            requests.head(address, timeout=self._timeout_seconds, allow_redirects=False)
        except requests.exceptions.SSLError:
            return  # it answers; whether its certificate is accepted is for MLflow's own settings to say
        except requests.exceptions.RequestException as fault:
            raise BackendError(
                f"mlflow: {redact(address)} does not answer ({type(fault).__name__}). "
                "The journal keeps the records until it does."
            ) from None

    def _call(self, function: Callable[..., _T], *arguments: Any, **keywords: Any) -> _T:
        """Call MLflow; its errors show the address with its password, so they are replaced by ours."""
        try:
            return function(*arguments, **keywords)
        except Exception as fault:
            raise _error_of(fault, self._run_id) from None

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _logger.warning("mlflow: %s", text)


class _RefusedError(BackendError):
    """Something in a call was not valid."""


def _tag_of(run: RunInfo | None) -> str:
    """Return the identity of a training as a text that can stand in a query."""
    identity = "" if run is None else run.run_id
    return identity if re.fullmatch(r"[\w.\-]*", identity) is not None else digest_of(identity)


def _import_mlflow() -> Any:
    try:
        return importlib.import_module("mlflow")
    except ImportError as fault:
        raise MissingExtraError('pip install "gradtrack[mlflow]"') from fault


def _error_of(fault: Exception, run_id: str | None) -> BackendError:
    code = str(getattr(fault, "error_code", ""))
    text = redact(str(fault)) or type(fault).__name__
    if code == "RESOURCE_DOES_NOT_EXIST":
        return PermanentBackendError(
            f"mlflow: {text} (run {run_id}): expected a run that exists. Check tracking_uri and run_id."
        )
    if code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
        return _RefusedError(f"mlflow: {text}")
    return BackendError(f"mlflow: {text}")


def metric_name(name: str) -> str:
    """Return the name of a metric in MLflow: itself, or where MLflow refuses it a readable one with a hash of it."""
    return valid_name(name, plain=_plain, clean=_clean, longest=_LONGEST_NAME)


def _plain(name: str) -> str | None:
    usual = re.fullmatch(rf"[/\w.\- ]{{1,{_LONGEST_NAME}}}", name) is not None and name == name.strip()
    return name if usual and not _resolves_elsewhere(name) else None


def _clean(name: str) -> str:
    parts = (part for part in re.sub(r"[^/\w.\- ]", "_", name).split("/") if part not in ("", ".", ".."))
    return posixpath.normpath("/".join(parts)).strip()


def _resolves_elsewhere(name: str) -> bool:
    return posixpath.normpath(name) != name or name in (".", "..") or name.startswith(("/", "../"))


def _key(record: Record) -> tuple[str, int]:
    return record.source, record.step


def _batches(rows: Iterable[list[Any]]) -> Iterator[list[Any]]:
    """Group metrics into calls of a size that MLflow takes; a row stays whole unless it is larger than a call."""
    batch: list[Any] = []
    size = 0
    for row in rows:
        for start in range(0, len(row), _MOST_METRICS):
            part = row[start : start + _MOST_METRICS]
            # A letter beyond ASCII is sent as six characters.
            weight = sum(120 + len(metric.key.encode("ascii", "backslashreplace")) for metric in part)
            if batch and (len(batch) + len(part) > _MOST_METRICS or size + weight > _MOST_BYTES):
                yield batch
                batch, size = [], 0
            batch, size = batch + part, size + weight
    if batch:
        yield batch


def _absolute(uri: str) -> str:
    """Return an address that means the same after the working directory has changed."""
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////") and ":memory:" not in uri:
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    return uri


def _without_secrets(uri: str) -> str:
    parts = urlsplit(uri)
    if "@" not in parts.netloc and not parts.query:
        return uri
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def saved_view(panels: Sequence[Panel], names: dict[str, str], created_ms: int) -> tuple[str, str]:
    """Return key and value of the experiment's tag that MLflow's page reads as a saved view."""
    sections: dict[str, dict[str, Any]] = {}
    cards = []
    for panel in panels:
        metrics = [names[name] for name in panel.pick(names) if name in names]
        if metrics and panel.kind in ("line", "multi-line", "band"):
            section = sections.setdefault(panel.section, _section(panel.section))
            cards.append(_card(panel, metrics, section["uuid"]))
    state = {
        "compareRunCharts": cards,
        "compareRunSections": list(sections.values()),
        "isAccordionReordered": False,
        "viewMaximized": True,
        "runListHidden": False,
        "hideEmptyCharts": True,
        "searchFilter": "",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
    }
    view = {"name": "gradtrack", "createdAt": created_ms, "state": json.dumps(state)}
    return f"mlflow.sharedViewState.{_identity('view')}", json.dumps(view)


def _section(name: str) -> dict[str, Any]:
    return {
        "uuid": _identity(f"section {name}"),
        "name": f"gradtrack: {name}",
        "display": True,
        "isReordered": False,
        "deleted": False,
        "isGenerated": False,
    }


def _card(panel: Panel, metrics: list[str], section: str) -> dict[str, Any]:
    return {
        "type": "LINE",
        "uuid": _identity(f"card {panel.section} {panel.title}"),
        "metricSectionId": section,
        "displayName": panel.title,
        "metricKey": metrics[0],
        "selectedMetricKeys": metrics,
        "lineSmoothness": 0,
        "xAxisScaleType": "linear",
        "scaleType": "log" if panel.log_scale else "linear",
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "range": {},
        "isGenerated": False,
        "deleted": False,
        "runsCountToCompare": 10,
    }


def _identity(name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, f"gradtrack {name}"))
