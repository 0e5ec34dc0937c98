"""Records as MLflow metrics, in the user's active run or in a run of their own."""

from __future__ import annotations

import html
import math
import os
import re
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, final

from gradtrack.backends.base import Backend, Outcome, RunParts, package_of
from gradtrack.backends.mlflow.store import Points, Store, absolute, batches, local_paths, metric_name
from gradtrack.backends.mlflow.views import saved_view
from gradtrack.delivery.destinations import check_links
from gradtrack.delivery.run_files import files_to_show
from gradtrack.errors import BackendError, ClosedError, UsageError
from gradtrack.records import Record, RunInfo
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
        self._mlflow = package_of("mlflow")
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
        self._parts = RunParts()
        self._confined: Path | None = None
        self._names: dict[str, str] = {}
        self._told_names = 0
        self._stored = Points(lambda name: self._store.call("get_metric_history", self._store.run_id, name))
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
        self._parts.take(records)
        self._store.check_alive()
        run_id = self._reach_run(create=True)
        assert run_id is not None
        with self._stored.changing():
            for metrics in batches(map(self._metrics, records)):
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
        files = files_to_show(self._parts.run, self._parts.files) if self._accepted else []
        if self._store.run_id is None or not (self._owned or files):
            return
        self._store.check_alive()
        try:
            self._upload(self._store.run_id, files)
        finally:
            if self._owned and self._confined is None:  # how the training of a replay ended, `end_run` is told
                self._store.end(self._store.run_id, "FAILED" if failed else "FINISHED")

    def end_run(self, outcome: Outcome, *, time: float) -> str:
        run_id = self._reach_run(create=False)
        if run_id is None:
            return ""
        run = self._store.call("get_run", run_id)
        # Only `_create_run` gives these tags, and a run of the user has none of them.
        is_ours = _OWNER_TAG in run.data.tags and run.data.tags.get(_RUN_TAG) == _tag_of(self._parts.run)
        is_open = run.info.lifecycle_stage == "active" and run.info.status in ("RUNNING", "SCHEDULED")
        if not (is_ours and is_open):
            return ""
        status = outcome.upper()
        self._store.end(run_id, status, end_time=max(round(time * 1000), run.info.start_time))
        return status

    def _upload(self, run_id: str, files: Sequence[tuple[Path, bytes]]) -> None:
        """Upload copies that only this user can change: MLflow opens a path again, and follows where it leads."""
        confined = self._confined
        if confined is not None and any(is_inside(path, confined) for path in local_paths(self._store.uri)):
            places = local_paths(self._store.call("get_run", run_id).info.artifact_uri or "")
            if not places or not all(is_inside(place, confined) for place in places):
                self._store.tell(
                    "files are left out: the store lies in the run's directory and names a place outside of it"
                )
                return
            try:
                check_links(places, confined, what="files are left out")
            except UsageError as fault:
                self._store.tell(str(fault))
                return
        with tempfile.TemporaryDirectory(prefix="gradtrack-") as directory:
            for path, content in files:
                copy = Path(directory, path.name)
                copy.write_bytes(content)
                self._store.call("log_artifact", run_id, str(copy), "gradtrack")

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
        _ = self._store.client

    def portable(self) -> Mapping[str, Any] | None:
        if not self._own_process or ":memory:" in self._store.uri:
            return None
        return {
            **self.address(),
            "tracking_uri": self._store.uri,
            "run_name": self._run_name,
            "saved_view": self._saved_view,
            "timeout_seconds": self._timeout_seconds,
            "owner": self._owner,
        }

    def moved(self, address: Mapping[str, Any]) -> None:
        self._store.run_id = address.get("run_id", self._store.run_id)

    def confine(self, directory: Path) -> None:
        self._confined = directory

    @classmethod
    def configured(cls) -> Mapping[str, Any]:
        return {"tracking_uri": absolute(str(package_of("mlflow").get_tracking_uri()))}

    @classmethod
    def probe(cls, **options: Any) -> str:
        store = cls(**options)._store
        store.check_alive()
        if store.run_id is None:
            return f"a new run at {store.address}"
        run = store.call("get_run", store.run_id)
        return f"run {store.run_id} ({run.info.status.lower()}) at {store.address}"

    def present(self, records: Sequence[Record]) -> set[tuple[str, int]] | None:
        self._parts.run = next((record.run for record in records if record.run is not None), self._parts.run)
        self._store.check_alive()
        if self._reach_run(create=False) is None:
            return set()
        # A store of files takes the metrics of a row one after the other, and a large row goes in several calls: where
        # the first one is there and the last one is not, some may be still to be written.
        there: set[tuple[str, int]] = set()
        for record in records:
            key = record.source, record.step, record.time
            self._begun.pop(key, None)
            metrics = self._metrics(record)
            if metrics and self._stored.has(metrics[0]):
                if self._stored.has(metrics[-1]):
                    there.add((record.source, record.step))
                else:
                    self._begun[key] = {metric.key for metric in metrics if self._stored.has(metric)}
        self._accepted = self._accepted or bool(there)
        return there

    def _metrics(self, record: Record) -> list[Any]:
        """Return the metrics of a record as MLflow takes them, without those that `present` has found there."""
        values = dict(record.metrics)
        if self._nonfinite == "count":
            finite = {name: value for name, value in values.items() if math.isfinite(value)}
            dropped = len(values) - len(finite)
            values = {**finite, NONFINITE: float(dropped)} if dropped else finite
        timestamp = round(record.time * 1000)
        begun = self._begun.get((record.source, record.step, record.time), ())
        self._names.update((name, metric_name(name)) for name in values if name not in self._names)
        metric = self._mlflow.entities.Metric
        return [
            metric(self._names[name], value, timestamp, record.step)
            for name, value in values.items()
            if self._names[name] not in begun
        ]

    def _reach_run(self, *, create: bool) -> str | None:
        """Return the identity of the run, which the server is asked for once; without one a run is found or made."""
        known = self._store.run_id
        if self._met:
            return known
        run = self._find_run() if known is None else self._store.call("get_run", known)
        if run is None and create:
            run = self._create_run()
        if run is None:
            return None
        # Something that answers to everything, such as a gateway, would take every row and keep none.
        if not run.info.run_id or run.info.run_id != (known or run.info.run_id):
            raise BackendError(
                f"mlflow: {self._store.address} answers, but not with a run: expected an MLflow server. "
                "Check tracking_uri and what lies between."
            )
        if known is None:
            self._store.run_id, self._experiment_id = run.info.run_id, run.info.experiment_id
            # A run whose creation succeeded although its answer was lost is ours as well.
            self._owned = run.data.tags.get(_OWNER_TAG) == self._owner
        self._met = True
        return self._store.run_id

    def _find_run(self) -> Any:
        """Find our run of this training, which another process, or a call without an answer, may have made."""
        if self._parts.run is None:
            return None
        query = f"tags.`{_RUN_TAG}` = '{_tag_of(self._parts.run)}'"
        found = self._store.call("search_runs", [self._ensure_experiment()], query, max_results=1)
        return found[0] if found else None

    def _create_run(self) -> Any:
        training = self._parts.run
        identity = "" if training is None else training.run_id
        note = f"Gradients of a training, recorded by gradtrack as run `{html.escape(identity)}`."
        tags = {_RUN_TAG: _tag_of(training), _OWNER_TAG: self._owner, "mlflow.note.content": note}
        name = self._run_name or f"gradtrack-{identity}"
        run = self._store.call("create_run", self._ensure_experiment(), run_name=name, tags=tags)
        if training is not None:
            param = self._mlflow.entities.Param
            params = [param(f"gradtrack/{key}", _shown(redact(str(value)))) for key, value in training.config.items()]
            self._store.call("log_batch", run.info.run_id, params=params, synchronous=True)
        return run

    def _ensure_experiment(self) -> str:
        if self._experiment_id is None:
            found = self._store.call("get_experiment_by_name", self._experiment)
            if found is not None:
                self._experiment_id = found.experiment_id
            else:
                self._experiment_id = self._store.call("create_experiment", self._experiment)
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
            self._store.call("log_batch", run_id, tags=tags[start : start + 100], synchronous=True)
        if self._saved_view and self._parts.panels:
            self._save_view(run_id)

    def _save_view(self, run_id: str) -> None:
        """Save the panels as a view of the experiment; the format is MLflow's own, so a failure only costs the view."""
        try:
            version = tuple(int(part) for part in self._mlflow.__version__.split(".")[:2])
            if version < _VIEWS_SINCE:
                return
            run = self._store.call("get_run", run_id)
            created = 0.0 if self._parts.run is None else self._parts.run.created
            key, value = saved_view(self._parts.panels, self._names, round(created * 1000))
            self._store.call("set_experiment_tag", run.info.experiment_id, key, value)
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
