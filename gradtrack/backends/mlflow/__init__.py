"""Records as MLflow metrics, in the user's active run or in a run of their own."""

from __future__ import annotations

import html
import importlib
import math
import os
import re
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, final

from gradtrack.backends.base import Backend
from gradtrack.backends.mlflow.store import Points, Store, absolute, batches, local_path, metric_name
from gradtrack.backends.mlflow.views import saved_view
from gradtrack.delivery.run_files import files_to_show
from gradtrack.errors import BackendError, ClosedError, MissingExtraError, UsageError
from gradtrack.records import Panel, Record, RunInfo
from gradtrack.support.names import HASH_LENGTH, digest_of
from gradtrack.support.redact import redact
from gradtrack.support.regular_files import is_inside

Nonfinite = Literal["keep", "count"]
NONFINITE: Final = "gradtrack/nonfinite"
_RUN_TAG: Final = "gradtrack.run_id"
_OWNER_TAG: Final = "gradtrack.owner"
_VIEWS_SINCE: Final = (3, 15)
_LONGEST_TEXT: Final = 5000


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
        self._store = Store(
            self._mlflow,
            absolute(tracking_uri or self._mlflow.get_tracking_uri()),
            run_id=active.info.run_id if active is not None else run_id,
            timeout_seconds=timeout_seconds,
        )
        # What MLflow itself would take for the next run; asking it for the number would call the server.
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        self._experiment_id = None if self._experiment else os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        self._run_name, self._nonfinite, self._saved_view = run_name, nonfinite, saved_view
        self._timeout_seconds = timeout_seconds
        self._own_process = own_process
        self._owner = owner or uuid.uuid4().hex
        self._owned = self._closed = self._met = self._accepted = False
        self._run: RunInfo | None = None
        self._confined: Path | None = None
        self._panels: list[Panel] = []
        self._files: dict[str, None] = {}
        self._names: dict[str, str] = {}
        self._told_names = 0
        self._stored = Points()
        self._begun: dict[tuple[str, int, float], set[str]] = {}  # rows that are half there, until the next write

    @property
    def run_id(self) -> str | None:
        """Return the identity of the MLflow run, or None before a run of our own is made."""
        return self._store.run_id

    def write(self, records: Sequence[Record]) -> None:
        if self._closed:
            raise ClosedError("mlflow backend: it is closed. Make a new one for another run.")
        if not records:
            return
        for record in records:
            self._run = record.run or self._run
            self._panels += [panel for panel in record.panels if panel not in self._panels]
            self._files.update(dict.fromkeys(record.files))
        self._store.check_alive()
        run_id = self._ensure_run()
        with self._stored.changing():
            for metrics in batches(self._left_of(record) for record in records):
                self._store.log(run_id, metrics)
                self._stored.add(metrics)
        self._begun.clear()
        self._accepted = True
        if len(self._names) > self._told_names:
            self._after_new_names(run_id, dict(list(self._names.items())[self._told_names :]))
            self._told_names = len(self._names)

    def close(self, *, failed: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        # A server that has refused the rows, or that has shown no run, gets no file either.
        files = files_to_show(self._run, self._files) if self._accepted else []
        if self._store.run_id is None or not (self._owned or files):
            return
        self._store.check_alive()
        try:
            self._upload(self._store.run_id, files)
        finally:
            if self._owned:
                self._store.end(self._store.run_id, failed=failed)

    def _upload(self, run_id: str, files: Sequence[tuple[Path, bytes]]) -> None:
        """Upload copies that only this user can change: MLflow opens a path again, and follows where it leads."""
        if self._leads_out(run_id):
            self._store.tell(
                "files are left out: the store lies in the run's directory and names a place outside of it"
            )
            return
        with tempfile.TemporaryDirectory(prefix="gradtrack-") as directory:
            for path, content in files:
                copy = Path(directory, path.name)
                copy.write_bytes(content)
                self._store.call(self._store.client.log_artifact, run_id, str(copy), "gradtrack")

    def address(self) -> dict[str, Any]:
        found: dict[str, Any] = {"tracking_uri": self._store.address}
        if self._store.run_id is not None:
            found["run_id"] = self._store.run_id
        elif self._experiment is not None:
            found["experiment"] = self._experiment
        if self._nonfinite != "keep":
            found["nonfinite"] = self._nonfinite
        return found

    def prepare(self) -> None:
        self._store.check_alive()
        self._store.open()

    def portable(self) -> Mapping[str, Any] | None:
        if not self._own_process or ":memory:" in self._store.uri:
            return None
        return {
            "run_id": self._store.run_id,
            "tracking_uri": self._store.uri,
            "experiment": self._experiment,
            "run_name": self._run_name,
            "nonfinite": self._nonfinite,
            "saved_view": self._saved_view,
            "timeout_seconds": self._timeout_seconds,
            "owner": self._owner,
        }

    def moved(self, address: Mapping[str, Any]) -> None:
        self._store.run_id = address.get("run_id", self._store.run_id)

    def confine(self, directory: Path) -> None:
        self._confined = directory

    def _leads_out(self, run_id: str) -> bool:
        """Say whether a store in a run directory that is replayed sends files to a place that only the store names."""
        store = local_path(self._store.uri)
        if self._confined is None or store is None or not is_inside(store, self._confined):
            return False
        place = local_path(self._store.call(self._store.client.get_run, run_id).info.artifact_uri or "")
        return place is None or not is_inside(place, self._confined)

    @classmethod
    def configured(cls) -> Mapping[str, Any]:
        return {"tracking_uri": absolute(str(_import_mlflow().get_tracking_uri()))}

    @classmethod
    def probe(cls, **options: Any) -> str:
        store = cls(**options)._store
        store.check_alive()
        if store.run_id is None:
            return f"a new run at {store.address}"
        run = store.call(store.client.get_run, store.run_id)
        return f"run {store.run_id} ({run.info.status.lower()}) at {store.address}"

    def present(self, records: Sequence[Record]) -> set[tuple[str, int]] | None:
        self._run = next((record.run for record in records if record.run is not None), self._run)
        self._store.check_alive()
        if self._store.run_id is None:
            found = self._find_run()
            if found is None:
                return set()
            self._adopt(found)
        assert self._store.run_id is not None
        self._meet(self._store.run_id)
        # A store of files takes the metrics of a row one after the other, and a large row goes in several calls: where
        # the first one is there and the last one is not, some may be still to be written.
        there: set[tuple[str, int]] = set()
        for record in records:
            metrics = self._metrics(record)
            if metrics and self._has(metrics[0]):
                if self._has(metrics[-1]):
                    there.add(_key(record))
                else:
                    begun = {metric.key for metric in metrics if self._has(metric)}
                    self._begun[(*_key(record), record.time)] = begun
        self._accepted = self._accepted or bool(there)
        return there

    def _has(self, metric: Any) -> bool:
        return (metric.step, metric.timestamp) in self._stored.of(metric.key, self._history)

    def _left_of(self, record: Record) -> list[Any]:
        """Return the metrics of a record without those that `present` has found there."""
        begun = self._begun.get((*_key(record), record.time), ())
        return [metric for metric in self._metrics(record) if metric.key not in begun]

    def _history(self, name: str) -> list[Any]:
        found: list[Any] = self._store.call(self._store.client.get_metric_history, self._store.run_id, name)
        return found

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

    def _ensure_run(self) -> str:
        if self._store.run_id is None:
            found = self._find_run()
            self._adopt(found if found is not None else self._create_run())
        assert self._store.run_id is not None
        self._meet(self._store.run_id)
        return self._store.run_id

    def _meet(self, run_id: str) -> None:
        """Make sure, once, that the server knows the run."""
        if not self._met:
            self._check(self._store.call(self._store.client.get_run, run_id), run_id)

    def _check(self, run: Any, run_id: str) -> None:
        """Believe nothing of what answers to everything, such as a gateway: it would take every row and keep none."""
        if not run_id or run.info.run_id != run_id:
            raise BackendError(
                f"mlflow: {self._store.address} answers, but not with a run: expected an MLflow server. "
                "Check tracking_uri and what lies between."
            )
        self._met = True

    def _adopt(self, run: Any) -> None:
        self._check(run, run.info.run_id)
        self._store.run_id, self._experiment_id = run.info.run_id, run.info.experiment_id
        # A run whose creation succeeded although its answer was lost is ours as well.
        self._owned = run.data.tags.get(_OWNER_TAG) == self._owner

    def _find_run(self) -> Any:
        """Find our run of this training, which another process, or a call without an answer, may have made."""
        if self._run is None:
            return None
        query = f"tags.`{_RUN_TAG}` = '{_tag_of(self._run)}'"
        found = self._store.call(self._store.client.search_runs, [self._ensure_experiment()], query, max_results=1)
        return found[0] if found else None

    def _create_run(self) -> Any:
        identity = "" if self._run is None else self._run.run_id
        note = f"Gradients of a training, recorded by gradtrack as run `{html.escape(identity)}`."
        tags = {_RUN_TAG: _tag_of(self._run), _OWNER_TAG: self._owner, "mlflow.note.content": note}
        name = self._run_name or f"gradtrack-{identity}"
        run = self._store.call(self._store.client.create_run, self._ensure_experiment(), run_name=name, tags=tags)
        if self._run is not None:
            param = self._mlflow.entities.Param
            params = [param(f"gradtrack/{key}", _shown(redact(str(value)))) for key, value in self._run.config.items()]
            self._store.call(self._store.client.log_batch, run.info.run_id, params=params, synchronous=True)
        return run

    def _ensure_experiment(self) -> str:
        if self._experiment_id is None:
            found = self._store.call(self._store.client.get_experiment_by_name, self._experiment)
            if found is not None:
                self._experiment_id = found.experiment_id
            else:
                self._experiment_id = self._store.call(self._store.client.create_experiment, self._experiment)
        assert self._experiment_id is not None
        return self._experiment_id

    def _after_new_names(self, run_id: str, names: dict[str, str]) -> None:
        """Keep the names that MLflow cannot hold as tags, and show the new metrics in the saved view."""
        tag = self._mlflow.entities.RunTag
        tags = [
            tag(f"gradtrack.name.{mapped[-HASH_LENGTH:]}", _shown(name))
            for name, mapped in names.items()
            if mapped != name
        ]
        for start in range(0, len(tags), 100):
            self._store.call(self._store.client.log_batch, run_id, tags=tags[start : start + 100], synchronous=True)
        if self._saved_view and self._panels:
            self._save_view(run_id)

    def _save_view(self, run_id: str) -> None:
        """Save the panels as a view of the experiment; the format is MLflow's own, so a failure only costs the view."""
        try:
            version = tuple(int(part) for part in self._mlflow.__version__.split(".")[:2])
            if version < _VIEWS_SINCE:
                return
            experiment_id = self._store.client.get_run(run_id).info.experiment_id
            key, value = saved_view(self._panels, self._names, round((self._run.created if self._run else 0) * 1000))
            self._store.client.set_experiment_tag(experiment_id, key, value)
        except Exception as fault:
            self._store.tell(f"the saved view could not be written: {redact(str(fault))}")


def _shown(text: str) -> str:
    """Return a text that MLflow takes as a value: not too long for any of its stores, and Unicode throughout."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 4]} ..."


def _tag_of(run: RunInfo | None) -> str:
    """Return the identity of a training as a text that can stand in a query."""
    identity = "" if run is None else run.run_id
    return identity if re.fullmatch(r"[\w.\-]*", identity) is not None else digest_of(identity)


def _import_mlflow() -> Any:
    try:
        return importlib.import_module("mlflow")
    except ImportError as fault:
        raise MissingExtraError("mlflow backend", "mlflow", "mlflow") from fault


def _key(record: Record) -> tuple[str, int]:
    return record.source, record.step
