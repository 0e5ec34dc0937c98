"""Records as history rows of Weights & Biases, in the user's run or in a run of their own."""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import math
import os
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, final

from gradtrack.backends.base import Backend
from gradtrack.errors import BackendError, ClosedError, MissingExtraError, PermanentBackendError, UsageError
from gradtrack.record.naming import valid_name
from gradtrack.records import Histogram, Record
from gradtrack.redact import redact

StepMode = Literal["polite", "row", "step"]
STEP: Final = "gradtrack/step"
_TAKEN_NAME: Final = "train/grad_norm"
_LONGEST_NAME: Final = 300
_PATIENCE_SECONDS: Final = 0.05
_LONGEST_WAIT_SECONDS: Final = 1.0
_MANY_HELD: Final = 1000
_MOST_BINS: Final = 512
_ALERT_SECONDS: Final = 300
_Identity = tuple[str, int, float, frozenset[str]]
_logger = logging.getLogger("gradtrack")


@final
class WandbBackend(Backend):
    """A backend for Weights & Biases that costs the user's run none of its rows.

    It writes to `run`, else to the run that is open where it is made, else to a run of its own, which it opens at the
    first record and ends. A run has one step counter for everybody, and rows behind it are dropped. `step_mode` says
    what happens to it in a run of the user's: `polite` never moves it, so that our rows join the user's and what finds
    none of them is written when the run ends; `row` commits every row by itself; `step` logs at the record's own step.
    The metrics in `withhold` are left out, and `train/grad_norm` is where somebody else writes it to the same run.
    """

    def __init__(
        self,
        *,
        run: Any = None,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        run_id: str | None = None,
        directory: str | None = None,
        step_mode: StepMode = "polite",
        withhold: Collection[str] = (),
        alerts: bool = False,
    ) -> None:
        if step_mode not in ("polite", "row", "step"):
            raise UsageError(f"wandb: step_mode {step_mode!r}: expected 'polite', 'row' or 'step'.")
        if run is not None and not callable(getattr(run, "log", None)):
            raise UsageError(f"wandb: run {run!r}: expected a run. Pass what wandb.init() returned.")
        self._wandb = _import_wandb()
        self._own = {"project": project, "entity": entity, "name": name, "id": run_id, "dir": directory}
        if run is None and run_id is None and project is None:
            run = self._wandb.run
        self._run: Any = run
        self._owned = run is None
        self._mode, self._alerts = step_mode, alerts
        self._withheld = set(withhold)
        self._known: set[str] = set()
        self._originals: dict[str, str] = {}
        self._alerted: dict[str, float] = {}
        self._partial: set[_Identity] = set()
        self._told: set[str] = set()
        self._closed = False
        self._rows: _PoliteRows | _OwnRows | None = None
        if run is not None:
            self._attach(run)

    @property
    def _project(self) -> str:
        return self._own["project"] or os.environ.get("WANDB_PROJECT") or "gradtrack"

    @property
    def run(self) -> Any:
        """Return the W&B run, or None before a run of our own is opened."""
        return self._run

    def write(self, records: Sequence[Record]) -> None:
        if self._closed:
            raise ClosedError("wandb backend: it is closed. Make a new one for another run.")
        if not records:
            return
        try:
            rows = self._ensure_run(records)
            if rows is None:
                return
            for record in records:
                if _identity(record) not in self._partial:
                    rows.write(self._row(record), record.step)
                    self._partial.add(_identity(record))
                    self._alert(record)
        except Exception as fault:
            raise self._error_of(fault) from None
        self._partial.clear()

    def close(self, *, failed: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        if self._run is None or self._rows is None:
            return
        try:
            self._rows.close()
            if self._owned:
                self._run.finish(exit_code=1 if failed else 0)
        except Exception as fault:
            raise self._error_of(fault) from None

    def address(self) -> dict[str, Any]:
        if self._run is None or self._run.disabled:
            return {key: value for key, value in (("project", self._own["project"]),) if value}
        found = {
            "run_id": self._run.id,
            "project": self._run.project,
            "entity": self._run.entity,
            "directory": str(Path(self._run.dir).absolute().parents[2]),
        }
        return {key: value for key, value in found.items() if value}

    @classmethod
    def probe(cls, **options: Any) -> str:
        backend = cls(**options)
        if backend._run is None:
            return f"a new run in project {backend._project} ({os.environ.get('WANDB_MODE', 'online')})"
        return f"run {backend._run.id} of project {backend._run.project}, which is open"

    def present(self, records: Sequence[Record]) -> set[tuple[str, int]] | None:
        address = self.address()
        run_id, directory = address.get("run_id", self._own["id"]), address.get("directory", self._own["dir"])
        found = {(record.source, record.step) for record in records if _identity(record) in self._partial}
        if run_id is None:
            return found
        files = sorted(Path(directory or ".", "wandb").glob(f"*run-*-{run_id}*/run-{run_id}.wandb"))
        wanted: dict[tuple[str, int], dict[str, float]] = {}
        for record in records:
            names = {self._name(name): value for name, value in record.metrics.items() if name not in self._withheld}
            wanted[(record.source, record.step)] = names
        for row in (row for path in files for row in read_history(path)):
            for source in {source for source, _ in wanted}:
                step = row.get(_series(STEP, source))
                metrics = wanted.get((source, step)) if isinstance(step, int) else None
                if metrics is not None and all(_same(row.get(name), value) for name, value in metrics.items()):
                    found.add((source, int(step or 0)))
        return found

    def _attach(self, run: Any) -> None:
        disabled = bool(getattr(run, "disabled", False))
        shared = getattr(getattr(run, "settings", None), "mode", "") == "shared"
        if disabled:
            self._rows = None
        elif self._owned or shared or self._mode == "row":
            self._rows = _OwnRows(run)
        elif self._mode == "step":
            self._rows = _OwnRows(run, with_step=True)
        else:
            self._rows = _PoliteRows(run, self._tell)

    def _ensure_run(self, records: Sequence[Record]) -> _PoliteRows | _OwnRows | None:
        if self._run is None:
            self._run = self._open(records)
            self._attach(self._run)
        return self._rows

    def _open(self, records: Sequence[Record]) -> Any:
        """Open a run of our own beside any other; one that cannot reach the server is kept on disk."""
        info = next((record.run for record in records if record.run is not None), None)
        options: dict[str, Any] = {key: value for key, value in self._own.items() if value is not None}
        options["project"] = self._project
        if "id" in options and os.environ.get("WANDB_MODE") != "offline":
            options["resume"] = "allow"
        if info is not None:
            options["config"] = {"gradtrack": {"run_id": info.run_id, **info.config}}
            if info.run_dir is not None and "dir" not in options:
                Path(info.run_dir).mkdir(parents=True, exist_ok=True)
                options["dir"] = info.run_dir
        settings = self._settings()
        try:
            return self._wandb.init(reinit="create_new", settings=settings, **options)
        except (self._wandb.errors.CommError, self._wandb.errors.UsageError) as fault:
            self._tell(f"the server cannot be used ({redact(str(fault))}); the run is kept offline, for `wandb sync`")
            options.pop("resume", None)
            return self._wandb.init(reinit="create_new", mode="offline", settings=settings, **options)

    def _settings(self) -> Any:
        try:
            # A killed process loses what was not flushed; the default is 15 seconds.
            return self._wandb.Settings(x_transaction_log_flush_interval=1.0, init_timeout=30)
        except Exception:  # an older version has no such setting
            return self._wandb.Settings()

    def _row(self, record: Record) -> dict[str, Any]:
        if _TAKEN_NAME in record.metrics:
            self._look_for_others()
        step = _series(STEP, record.source)
        metrics = {name: value for name, value in record.metrics.items() if name not in self._withheld}
        row: dict[str, Any] = {self._define(name, step): value for name, value in metrics.items()}
        for name, histogram in record.histograms.items():
            drawn = self._histogram(histogram)
            if drawn is not None:
                row[self._define(name, step)] = drawn
        if step not in self._known:
            self._known.add(step)
            self._run.define_metric(step, hidden=True)
        return {**row, step: record.step}

    def _define(self, name: str, step: str) -> str:
        """Give a metric our axis, by its exact name: among patterns that overlap W&B chooses at random."""
        key = self._name(name)
        if key not in self._known:
            self._known.add(key)
            self._run.define_metric(key, step_metric=step)
            if key != name.replace(".", ":"):
                self._originals[key] = name
                self._run.config.update({"gradtrack_names": dict(self._originals)}, allow_val_change=True)
        return key

    def _name(self, name: str) -> str:
        return metric_name(name)

    def _look_for_others(self) -> None:
        """Leave our norm out where a framework writes one under the same name to the same run."""
        if self._owned or _TAKEN_NAME in self._withheld:
            return
        if "per_device_train_batch_size" in self._run.config:
            reason = "the Hugging Face Trainer"
        elif self._wandb.patched["tensorboard"] or getattr(self._run.settings, "sync_tensorboard", False):
            reason = "sync_tensorboard"
        elif _TAKEN_NAME not in self._known and _TAKEN_NAME in self._run.summary.keys():  # noqa: SIM118 (no iterator)
            reason = "another part of the program"
        else:
            return
        self._withheld.add(_TAKEN_NAME)
        self._tell(f"{_TAKEN_NAME} is written to this run by {reason}; ours is left out here, the journal has it")

    def _histogram(self, found: Histogram) -> Any:
        usable = len(found.edges) == len(found.counts) + 1 > 1 and all(math.isfinite(edge) for edge in found.edges)
        if not usable or len(found.counts) > _MOST_BINS:
            return None
        return self._wandb.Histogram(np_histogram=(list(found.counts), list(found.edges)))

    def _alert(self, record: Record) -> None:
        """Alert on critical issues, on each at most every five minutes."""
        if not self._alerts:
            return
        for issue in record.issues:
            title = f"gradtrack: {issue.get('issue_type')} {issue.get('layer', '')}".strip()
            recent = record.time - self._alerted.get(title, -math.inf) < _ALERT_SECONDS
            if issue.get("severity") == "CRITICAL" and not recent:
                self._alerted[title] = record.time
                text = f"step {record.step}: {issue.get('message')}"
                self._run.alert(title=title, text=text, level="ERROR", wait_duration=_ALERT_SECONDS)

    def _error_of(self, fault: Exception) -> Exception:
        if isinstance(fault, BackendError):
            return fault
        text = redact(str(fault)) or type(fault).__name__
        if "is finished" in text:
            return PermanentBackendError(
                f"wandb: {text}: expected an open run. Close the manager before the run; "
                "`gradtrack replay` delivers the rows that came after."
            )
        return BackendError(f"wandb: {type(fault).__name__}: {text}")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _logger.warning("wandb: %s", text)


class _OwnRows:
    """Rows in a run whose step counter is ours, or does not matter."""

    def __init__(self, run: Any, *, with_step: bool = False) -> None:
        self._run, self._with_step = run, with_step

    def write(self, row: Mapping[str, Any], step: int) -> None:
        """Commit a row by itself, or leave it open at its own step."""
        if self._with_step:
            self._run.log(row, step=step)
        else:
            self._run.log(row)

    def close(self) -> None:
        """Leave the rest to the run."""


class _PoliteRows:
    """Rows in a run whose step counter is the user's.

    A row of ours is added to the row that W&B holds open, without committing it. The next one follows only when the
    counter has moved on since then, because then the open row was committed with ours in it: the counter is read after
    our row was added, so a move of the user's in between can only make us wait for another one, never write over a row
    that is still open. Rows that find no open row of the user's are committed when the run ends, after which no step of
    the user's can come too late.
    """

    def __init__(self, run: Any, tell: Any) -> None:
        self._run, self._tell = run, tell
        self._held: deque[Mapping[str, Any]] = deque()
        self._open_at: int | None = None
        self._lock = threading.RLock()
        self._ended = False
        self._hooked = self._hook()
        # A run that nobody finishes ends with the interpreter, and its own way out does not ask us.
        atexit.register(self._finish)

    def write(self, row: Mapping[str, Any], step: int) -> None:
        """Add a row to the user's, now or later."""
        with self._lock:
            if self._ended or getattr(self._run, "_is_finished", False):
                raise PermanentBackendError(
                    "wandb: the run is finished: expected it to be open. Close the manager before the run; "
                    "`gradtrack replay` delivers the rows that came after."
                )
            self._held.append(row)
            try:
                self._offer()
            except BaseException:
                if self._held and self._held[-1] is row:  # it comes again
                    self._held.pop()
                raise
        if len(self._held) > _MANY_HELD:
            self._tell(
                f"more than {_MANY_HELD} rows wait for rows of yours to join; they are written when the run ends. "
                "Set step_mode='row' if you never log with step="
            )

    def close(self) -> None:
        """Write what is left when the run ends, or now where the run cannot tell us about its end."""
        if not self._hooked:
            self._finish()

    def _offer(self) -> None:
        """Add held rows one by one, as long as the user's rows keep coming."""
        end = time.monotonic() + _LONGEST_WAIT_SECONDS
        while self._held and self._moved_on(end):
            self._run.log(self._held[0], commit=False)
            self._held.popleft()
            self._open_at = self._run.step

    def _moved_on(self, end: float) -> bool:
        """Say whether our last row was committed; where rows wait in line, wait a moment for it."""
        if self._open_at is None:
            return True
        limit = min(end, time.monotonic() + (_PATIENCE_SECONDS if len(self._held) > 1 else 0.0))
        pause = 0.001
        while self._run.step <= self._open_at:
            if time.monotonic() >= limit:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        return True

    def _hook(self) -> bool:
        """Ask to be called before the run ends by its `finish`."""
        try:
            run_module = importlib.import_module("wandb.sdk.wandb_run")
            hook = run_module.TeardownHook(self._finish, run_module.TeardownStage.EARLY)
            self._run._teardown_hooks.append(hook)
        except Exception:
            return False
        return True

    def _finish(self) -> None:
        """Commit the row that is open, then the rows in line."""
        atexit.unregister(self._finish)
        with self._lock:
            if self._ended:
                return
            self._ended = True
            try:
                if self._open_at is not None and self._run.step <= self._open_at:
                    self._run.log({}, commit=True)
                self._open_at = None
                while self._held:
                    self._run.log(self._held[0])
                    self._held.popleft()
            except Exception as fault:
                self._tell(f"{len(self._held)} rows could not be written at the end ({redact(str(fault))})")


def _import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as fault:
        raise MissingExtraError('pip install "gradtrack[wandb]"') from fault


def metric_name(name: str) -> str:
    """Return the name of a metric in W&B, where a dot would be a path, a star a pattern, and an underscore reserved."""
    return valid_name(name, plain=_plain, clean=_clean, longest=_LONGEST_NAME)


def _plain(name: str) -> str | None:
    usual = re.fullmatch(rf"[\w/.\- ]{{1,{_LONGEST_NAME}}}", name) is not None and name == name.strip()
    return name.replace(".", ":") if usual and not name.startswith("_") else None


def _clean(name: str) -> str:
    return re.sub(r"[^\w/\- ]", "_", name).strip("_ ")


def _identity(record: Record) -> _Identity:
    """Tell a record from others of its step: what an optimizer did to a step is a record of its own."""
    return record.source, record.step, record.time, frozenset(record.metrics)


def _series(name: str, source: str) -> str:
    return f"{name}/{source}" if source else name


def _same(left: object, right: float) -> bool:
    if not isinstance(left, (int, float)):
        return False
    return left == right or (math.isnan(left) and math.isnan(right))


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a run's own file: blocks of records, each whole or in parts, as far as they are intact."""
    message = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    for content in _read_records(path.read_bytes()):
        record = message()
        try:
            record.ParseFromString(content)
        except Exception:
            return
        if record.HasField("history"):
            items = record.history.item
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _read_records(content: bytes, block: int = 32768, header: int = 7) -> Iterator[bytes]:
    position, parts = header, b""
    while position + header <= len(content):
        left = block - position % block
        if left < header:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        data = content[position + header : position + header + length]
        if kind == 0 or len(data) < length:
            return
        position += header + length
        parts = data if kind in (1, 2) else parts + data
        if kind in (1, 4):
            yield parts
