"""Records as rows of Trackio's store on this machine, in the user's run or in a run of their own."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, final

from gradtrack.backends.base import Backend, package_of
from gradtrack.errors import BackendError, ClosedError, UsageError
from gradtrack.records import Record, RunInfo
from gradtrack.support.names import digest_of, valid_name
from gradtrack.support.redact import redact

_RESERVED: Final = frozenset({"project", "run", "timestamp", "step", "time", "metrics"})
"""The names of columns, which Trackio itself renames."""
_OURS: Final = "gradtrack"
_LONGEST_NAME: Final = 1000
_ASKED_AT_ONCE: Final = 500


@final
class TrackioBackend(Backend):
    """A backend for Trackio that writes many rows in one transaction, and each of them once.

    It writes to `run`, else to the run that is open in the thread of the training by the first record, else to a run of
    its own in `project`, which is named after the training, or `run_name`. A local run gets its rows in Trackio's
    store, under an identity that the store keeps once; the user's own count of steps is left alone. Where the user's
    run is sent to a Space or a server, the rows are handed to its `log`, which is all that can be known of them.
    A training that was resumed goes on in the run of its own that it had before. The metrics in `withhold` are left
    out.
    """

    def __init__(
        self,
        *,
        run: Any = None,
        project: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
        directory: str | None = None,
        withhold: Collection[str] = (),
    ) -> None:
        self._trackio = package_of("trackio")
        self._store, self._home = _store_of(self._trackio)
        if directory is not None and not _is_same(directory, self._home):
            raise UsageError(
                f"trackio: directory {directory!r}: expected {self._home!r}, where Trackio of this process keeps its "
                f"runs. Set TRACKIO_DIR={directory} before Trackio is imported."
            )
        if run is not None and not callable(getattr(run, "log", None)):
            raise UsageError(f"trackio: run {run!r}: expected a run. Pass what trackio.init() returned.")
        if run_id is not None and run_name is None:
            raise UsageError(f"trackio: run_id {run_id!r}: expected the run_name as well. Pass both, or run=.")
        self._run = run
        self._joins = run is None and project is None and run_id is None
        self._project, self._run_name, self._run_id = project or _OURS, run_name, run_id
        self._owned = run is None and run_id is None
        self._withheld = frozenset(withhold)
        self._config: dict[str, Any] | None = None
        self._info: RunInfo | None = None
        self._closed = False
        self._take(run)
        self._join()
        if self._run is None:
            self._check_local()

    def write(self, records: Sequence[Record]) -> None:
        if self._closed:
            raise ClosedError("trackio backend: it is closed. Make a new one for another run.")
        if not records:
            return
        self._learn(records)
        rows = [
            {metric_name(name): value for name, value in record.metrics.items() if name not in self._withheld}
            for record in records
        ]
        if self._is_remote:
            for row, record in zip(rows, records, strict=True):
                self._run.log(row, step=record.step)
            return
        try:
            run_id, name, config = self._find_run()
            self._store.bulk_log(
                project=self._project,
                run=name,
                run_id=run_id,
                metrics_list=rows,
                steps=[record.step for record in records],
                timestamps=[_time_of(record) for record in records],
                log_ids=self._identities(records),
                config=config,
            )
        except Exception as fault:
            raise BackendError(f"trackio: {type(fault).__name__}: {redact(str(fault))}") from fault
        self._config = None

    def close(self, *, failed: bool = False) -> None:
        self._closed = True

    def present(self, records: Sequence[Record]) -> set[tuple[str, int]] | None:
        self._learn(records)
        if self._is_remote:
            return None
        found: set[str] = set()
        identities = dict(zip(self._identities(records), records, strict=True))
        for start in range(0, len(identities), _ASKED_AT_ONCE):
            asked = list(identities)[start : start + _ASKED_AT_ONCE]
            words = ", ".join(f"'{one}'" for one in asked)
            try:
                answer = self._store.query_project(
                    self._project, f"SELECT log_id FROM metrics WHERE log_id IN ({words})", max_rows=_ASKED_AT_ONCE
                )
            except FileNotFoundError:
                return set()
            except Exception as fault:
                raise BackendError(f"trackio: {type(fault).__name__}: {redact(str(fault))}") from fault
            found.update(row["log_id"] for row in answer["rows"])
        return {(record.source, record.step) for identity, record in identities.items() if identity in found}

    def before_end(self, deliver: Any) -> None:
        self._join()

    def address(self) -> Mapping[str, Any]:
        self._join()
        if self._is_remote:
            return {}
        found: dict[str, Any] = {"project": self._project, "run_name": self._run_name, "directory": self._home}
        found |= {} if self._owned else {"run_id": self._run_id}
        return {name: value for name, value in (found | {"withhold": sorted(self._withheld)}).items() if value}

    @classmethod
    def configured(cls) -> Mapping[str, Any]:
        return {"directory": _store_of(package_of("trackio"))[1]}

    @classmethod
    def probe(cls, **options: Any) -> str:
        backend = cls(**options)
        if backend._run is not None:
            return f"run {backend._run.name} of project {backend._project}, which is open"
        return f"a run in project {backend._project} in {backend._home}"

    @property
    def _is_remote(self) -> bool:
        """Whether the user's run goes to a Space or a server."""
        return self._run is not None and bool(getattr(self._run, "url", None))

    def _join(self) -> None:
        """Write to the user's run from now on, if one is open in this thread and none was chosen yet."""
        if self._run is None and self._joins and self._run_id is None:
            current = self._trackio.context_vars.current_run.get()
            if current is not None:
                self._run, self._owned = current, False
                self._take(current)

    def _take(self, run: Any) -> None:
        if run is not None:
            self._project, self._run_name, self._run_id = run.project, run.name, run.id

    def _check_local(self) -> None:
        """Refuse settings of Trackio by which a run of our own would not be in the store of this machine."""
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            if os.environ.get(name):
                raise UsageError(
                    f"trackio: {name} is set, and no run is open: expected a run that is sent there. "
                    "Call trackio.init() before the manager is made."
                )
        if self._trackio.utils.get_storage_mode() != "sqlite":
            raise UsageError(
                f"trackio: {self._home!r} is on a network file system: expected one on which SQLite is safe. Set "
                "TRACKIO_DIR to a local directory, or TRACKIO_STORAGE_MODE=sqlite where one process writes there."
            )

    def _learn(self, records: Sequence[Record]) -> None:
        self._info = next((record.run for record in records if record.run is not None), self._info)

    def _find_run(self) -> tuple[str, str, dict[str, Any] | None]:
        """Return the identity and the name of the run, and its configuration where that is new."""
        training = "" if self._info is None else self._info.run_id
        if self._run_id is None:
            before = {training, "" if self._info is None else self._info.resumed_from} - {""}
            for run_id, config in self._store.get_all_run_configs(self._project).items():
                trainings = _trainings_in(config)
                if not before.isdisjoint(trainings):
                    self._run_id, self._run_name = run_id, config[_OURS].get("name", self._run_name)
                    self._config = None if training in trainings else _joined_by(config, training)
                    break
            else:
                self._run_id = f"{_OURS}-{digest_of(training)}"
                self._run_name = self._run_name or training or _OURS
                settings = {} if self._info is None else dict(self._info.config)
                ours = {"name": self._run_name, "trainings": [training], **settings}
                self._config = {_OURS: ours, "_Created": datetime.now(UTC).isoformat()}
        return self._run_id, self._run_name or training or _OURS, self._config

    def _identities(self, records: Sequence[Record]) -> list[str]:
        """Return for each record the name by which the store keeps it once."""
        training = "" if self._info is None else self._info.run_id
        return [
            hashlib.sha256(
                repr((training, record.source, record.step, record.time, sorted(record.metrics))).encode(
                    "utf-8", "surrogatepass"
                )
            ).hexdigest()[:32]
            for record in records
        ]


def _trainings_in(config: Any) -> list[str]:
    """Return the trainings whose rows a run has; none where what the user has put in that place is not ours."""
    ours = config.get(_OURS) if isinstance(config, dict) else None
    trainings = ours.get("trainings") if isinstance(ours, dict) else None
    return [one for one in trainings if isinstance(one, str)] if isinstance(trainings, list) else []


def _joined_by(config: dict[str, Any], training: str) -> dict[str, Any]:
    """Return the configuration of a run with one more training that was resumed into it."""
    ours = config[_OURS]
    return {**config, _OURS: {**ours, "trainings": [*ours["trainings"], training]}}


def _store_of(package: Any) -> tuple[Any, str]:
    """Return Trackio's store with the directory in which it lies; one of another version than we know is refused."""
    needed = {"project", "run", "metrics_list", "steps", "timestamps", "config", "log_ids", "run_id"}
    try:
        store, home = package.sqlite_storage.SQLiteStorage, os.path.abspath(package.utils.TRACKIO_DIR)
        _ = store.query_project, store.get_all_run_configs, package.context_vars.current_run
        is_known = needed <= inspect.signature(store.bulk_log).parameters.keys()
    except AttributeError:
        is_known = False
    if not is_known:
        raise UsageError(
            f"trackio {getattr(package, '__version__', '')}: expected a store that takes rows with an identity, as "
            'that of version 0.43 does. Run: pip install "gradtrack[trackio]"'
        )
    return store, home


def _is_same(left: str, right: str) -> bool:
    return os.path.realpath(os.path.expanduser(left)) == os.path.realpath(right)


def _time_of(record: Record) -> str:
    return datetime.fromtimestamp(record.time, UTC).isoformat()


def metric_name(name: str) -> str:
    """Return the name under which Trackio shows a metric."""

    def plain(text: str) -> str | None:
        is_usual = text not in _RESERVED and not text.startswith("_") and len(text) <= _LONGEST_NAME
        return text if is_usual and text.isprintable() and text.strip() else None

    return valid_name(
        name,
        plain=plain,
        clean=lambda text: "".join(letter if letter.isprintable() else "_" for letter in text).lstrip("_"),
        longest=_LONGEST_NAME,
    )
