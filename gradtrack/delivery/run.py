"""A run: its identity, its directory, where its rows go, and the opening of the delivery."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import logging
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch

from gradtrack import registry
from gradtrack._version import __version__
from gradtrack.alerts.base import Alert, Message
from gradtrack.backends.base import Backend, address_of
from gradtrack.config import GradientConfig
from gradtrack.delivery.at_exit import termination
from gradtrack.delivery.delivery import Delivery, status_of
from gradtrack.delivery.journal.writing import Journal
from gradtrack.delivery.locks import Claim, ForkGuard, Place, claim_or_own, place_of_first, tell_place
from gradtrack.delivery.run_files import ensure_writable, holds_run, new_run_id, runs_in
from gradtrack.delivery.subprocess import ProcessBackend, outsourced
from gradtrack.delivery.worker import AlertWorker
from gradtrack.errors import InputTypeError, UsageError
from gradtrack.records import Record, RunInfo
from gradtrack.reports import Issue, IssueSeverity, StepReport
from gradtrack.support.names import names_run
from gradtrack.support.rank import num_ranks, process_rank
from gradtrack.support.redact import is_hidden, redact, redact_values

_logger = logging.getLogger("gradtrack")
_sinks = itertools.count()


def without_hidden(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the options whose secrets were taken out; the environment or the caller has them."""
    return {name: value for name, value in options.items() if not is_hidden(value)}


def moved_along(options: Mapping[str, Any], home: str, directory: Path) -> dict[str, Any]:
    """Return options whose paths inside of a run's directory are where that directory lies now."""
    now = os.path.abspath(directory)
    if not home or home == now:
        return dict(options)
    # What a replay has noted since the move is there already, which shows where the run was moved to a place within.
    there = rf"(?!{re.escape(now)}(?:/|$))"
    inside = re.compile(rf"(?<![^/:]){there}{re.escape(home)}(?=/|$)")
    return {
        name: inside.sub(lambda _: now, value) if isinstance(value, str) else value for name, value in options.items()
    }


def _chosen(config: GradientConfig) -> dict[str, Any]:
    """Return which backends and analyzers were asked for, by name, with the options that can be written down."""
    return {
        known.kind: specs if isinstance(specs, str) else [_named(spec, known) for spec in specs]
        for known in (registry.backends, registry.analyzers)
        if known.kind in config.model_fields_set and (specs := getattr(config, known.kind))
    } | ({"alerts": [registry.alerts.name_of(spec) for spec in config.alerts]} if config.alerts else {})


def _named(spec: object, known: registry.Registry) -> str | dict[str, Any]:
    found = registry.split_spec(spec, "plugin")
    if found is None:
        return known.name_of(spec)
    name, options = found[0], plain_options(found[1])
    return {"name": name, **options} if options else name


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that can be written down, without their secrets."""
    found: dict[str, Any] = {}
    for name, value in redact_values(options).items():
        try:
            found[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):  # an object that only this process has
            continue
    return found


class Sink:
    """The way out of a manager: one identity, one run directory, the backends, the journal and the delivery.

    Only rank 0 makes and feeds backends; every other rank keeps a journal where the run has files. A directory that
    another run writes or has written to is left to it: this run then has one of its own inside of it. A training that
    was resumed goes on in the directory of the run that had saved its checkpoint.
    """

    def __init__(self, config: GradientConfig) -> None:
        self.run_id = new_run_id(config.run_dir)
        self.rank = process_rank()
        self.backends = build_backends(config.backends, absent=self.rank != 0)
        if config.run_dir is not None:
            ensure_writable(config.run_dir)
        self.alerts = build_alerts(config.alerts) if self.rank == 0 else {}
        self.on_open: Callable[[], object] = lambda: None
        self._working = {name: outsourced(backend) for name, backend in self.backends.items()}
        self._config = config
        self._directory = None if config.run_dir is None else config.run_dir.absolute()
        self._claim: Claim | None = None
        self._number = next(_sinks) if config.fingerprints or config.capture != "off" else -1
        self._place: Place | None = None
        self._is_placed = False
        self._resumed: dict[str, Any] = {}
        self._resumed_in_place = False
        self._delivery: Delivery | None = None
        self._opening = threading.RLock()  # two threads may come with their first rows at once
        self._guard = ForkGuard()
        self._closed = False

    @property
    def forked(self) -> bool:
        """Whether this process is a copy of the one that records."""
        return self._guard.forked

    @property
    def keeps_files(self) -> bool:
        """Whether the run has a directory: it was named, or a backend needs one."""
        return self._config.run_dir is not None or any(not backend.inline for backend in self.backends.values())

    @property
    def directory(self) -> Path | None:
        """Return the run's directory, or None where nothing is written."""
        if self._directory is None and self.keeps_files:
            self._directory = (Path("gradtrack_runs") / self.run_id).absolute()
        return self._directory

    def claim(self) -> Path | None:
        """Return the run's directory, which from now on no other run writes to."""
        directory = self.directory
        if directory is None or self._claim is not None or self._guard.forked:
            return directory
        if self.rank == 0:
            is_taken = (lambda _: False) if self._resumed_in_place else holds_run
            self._directory, self._claim = claim_or_own(directory, self.run_id, what="run_dir", is_taken=is_taken)
        return self._directory

    def shared_place(self) -> Place | None:
        """Return the directory of rank 0 on every rank, which no other run writes to.

        None where there is none, or where rank 0 does not tell it in time: what is written elsewhere could be among
        the files of another run. A rank whose run_dir is not that of rank 0 locks its own.
        """
        if self.keeps_files and not self._is_placed and not self._guard.forked:
            self._is_placed, self._place = True, self._find_place()
        return self._place

    def _find_place(self) -> Place | None:
        asked = self._config.run_dir
        if self.rank != 0:
            place, claim = place_of_first(asked, self.run_id, self.rank, self._number, resumed=self._resumed_in_place)
            self._claim = self._claim or claim
            return place
        directory = self.claim()
        assert directory is not None
        if num_ranks() > 1:
            tell_place(asked, Place(directory, self.run_id), self._number)
        return Place(directory, self.run_id)

    def state_dict(self) -> dict[str, str]:
        """Return what a training that is resumed needs to find this run; nothing where nothing is written."""
        directory = self.directory
        return {} if directory is None else {"run_id": self.run_id, "directory": directory.name}

    def resume(self, state: Mapping[str, str], steps: Mapping[str, int]) -> None:
        """Go on with the run of a checkpoint after these steps of its pairs; without effect behind the first row."""
        run_id, name = state.get("run_id", ""), state.get("directory", "")
        made = {source: step for source, step in steps.items() if step}
        if self._claim is not None or self._delivery is not None or run_id == self.run_id or not made:
            return
        self._resumed = {"resumed_from": run_id, "resumed_at": made}
        directory = self.directory
        if directory is None or not run_id or name != Path(name).name:
            return
        places = [directory, directory / name, *([directory.parent / name] if names_run(directory.name) else [])]
        former = next((place for place in places if run_id in runs_in(place)), None)
        self._directory, self._resumed_in_place = former or directory, former is not None
        if former not in (None, directory) and names_run(directory.name):
            with contextlib.suppress(OSError):  # it was made for this run, and is empty
                directory.rmdir()

    def prepare(self) -> None:
        """Let the backends that work in processes of their own start, since a training has begun."""
        for backend in self._working.values():
            if isinstance(backend, ProcessBackend) and not self._guard.forked:
                backend.prepare()

    def post(self, issue: Issue, report: StepReport) -> None:
        """Post an issue that has opened to every alert, without waiting for any."""
        if self._guard.forked:
            return
        message = Message(
            run_id=self.run_id,
            run_dir=None if self.directory is None else str(self.directory),
            source=report.source,
            step=report.step,
            time=report.time,
            issue=redact_values(issue.model_dump(mode="json")),
        )
        for worker in self.alerts.values():
            if issue.severity >= worker.min_severity:
                worker.post(message)

    def write(self, record: Record) -> None:
        """Send a record on its way."""
        if self._delivery is None:
            if self._guard.silent():
                return
            with self._opening:
                if self._delivery is None:
                    self._delivery = self._open()
        self._delivery.write(record)

    def tell_if_unkept(self, num_steps: int) -> None:
        """Say at the end of a training of which nothing was configured to be kept how to keep it."""
        asked = self._config.model_fields_set & {"backends", "run_dir"}
        if num_steps and not asked and self.rank == 0 and not self._guard.forked:
            _logger.warning(
                "nothing was kept of these %d step(s): pass run_dir='runs/exp1', which `gradtrack report` reads, or "
                "backends=['tensorboard'], to GradientManager; backends=[] keeps nothing on purpose.",
                num_steps,
            )

    def flush(self) -> None:
        """Make everything that was written durable."""
        if self._delivery is not None:
            self._delivery.flush()

    def close(self, *, failed: bool) -> None:
        """Let the backends go, also those that never got a record; a second call does nothing."""
        if self._guard.forked or self._closed:
            return
        end = time.monotonic() + self._config.close_timeout_seconds
        for worker in self.alerts.values():
            worker.ask_close(end)
        with self._opening:
            if self._delivery is None:
                self._delivery = self._deliver(self._run_info())
        self._delivery.close(failed=failed)
        termination.remove(self)
        for worker in self.alerts.values():
            worker.join(end)
        if self._claim is not None:
            self._claim.release()
        self._closed = True

    def terminate(self) -> None:
        """Deliver what is left while no further row is written, since the process is about to end."""
        if self._delivery is not None and not self._guard.forked:
            self._delivery.terminate()

    def status(self) -> dict[str, dict[str, Any]]:
        """Tell what each backend has taken, and what it has not."""
        if self._delivery is None:
            return {name: status_of() for name in self.backends}
        return self._delivery.status()

    def journal_status(self) -> dict[str, Any] | None:
        """Tell what the journal has and where it lies; None where there is none."""
        return None if self._delivery is None else self._delivery.journal_status()

    def _open(self) -> Delivery:
        """Begin to deliver, on the first record."""
        self.on_open()
        if self.rank == 0:
            termination.add(self)
        if self.rank != 0 and self.backends:
            _logger.info("rank %d leaves the trackers to rank 0", self.rank)
        directory, run = self.claim(), self._run_info()
        if directory is None:
            return self._deliver(run, rank=self.rank)
        # What a replay needs to reach the same places again, without secrets.
        given = dict(filter(None, (registry.split_spec(spec, "backend") for spec in self._config.backends)))
        known = [
            {"name": name, "options": {**plain_options(given.get(name, {})), **plain_options(address_of(backend))}}
            for name, backend in self.backends.items()
            if not backend.inline
        ]
        return self._deliver(run, Journal(directory, run, backends=known, rank=self.rank), rank=self.rank)

    def _deliver(self, run: RunInfo, journal: Journal | None = None, *, rank: int = 0) -> Delivery:
        return Delivery(
            self._working,
            run=run,
            journal=journal,
            rank=rank,
            guard=self._guard,
            close_timeout_seconds=self._config.close_timeout_seconds,
        )

    def _run_info(self) -> RunInfo:
        config = self._config.model_dump(mode="json", exclude_unset=True, exclude={"backends", "analyzers", "alerts"})
        directory = self.directory
        return RunInfo(
            run_id=self.run_id,
            run_dir=None if directory is None else str(directory),
            created=time.time(),
            **self._resumed,
            config=redact_values(config | _chosen(self._config)),
            environment={
                "gradtrack": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "platform": platform.platform(),
            },
        )


def build_alerts(specs: list[Any]) -> dict[str, AlertWorker]:
    """Make the alerts that a configuration names, each with a worker; of one kind there may be several."""
    built: dict[str, AlertWorker] = {}
    for spec in specs:
        named = registry.split_spec(spec, "alert")
        kind, alert, least = registry.alerts.name_of(spec), spec, IssueSeverity.MEDIUM
        if named is not None:
            least = _severity(kind, named[1].pop("min_severity", least))
            alert = registry.alerts.load_for(*named)(**named[1])
        if not isinstance(alert, Alert):
            raise InputTypeError(
                f"alert {type(spec).__name__}: expected a gradtrack.Alert. Derive its class from that."
            )
        count = sum(name.partition("_")[0] == kind for name in built)
        name = f"{kind}_{count + 1}" if kind in built else kind
        built[name] = AlertWorker(name, alert, least)
    return built


def _severity(kind: str, given: object) -> IssueSeverity:
    try:
        return IssueSeverity(str(given).upper() if isinstance(given, str) else given)
    except ValueError:
        names = ", ".join(one.value for one in IssueSeverity)
        raise UsageError(f"alert {kind!r}: min_severity = {given!r}: expected one of {names}.") from None


@final
class Absent(Backend):
    """What stands for a tracker where only rank 0 has it: it is never written to."""

    def write(self, records: Sequence[Record]) -> None:
        """Take nothing."""


def build_backends(specs: list[Any], *, absent: bool = False) -> dict[str, Backend]:
    """Make the backends that a configuration names, all or none; `absent` ones are names, and touch no tracker."""
    built: dict[str, Backend] = {}
    try:
        for spec in specs:
            named = registry.split_spec(spec, "backend")
            if named is None:
                name, backend = registry.backends.name_of(spec), spec
            else:
                name, options = named
                backend = Absent() if absent and not registry.backends.load(name).inline else build(name, options)
            if not isinstance(backend, Backend):
                raise InputTypeError(f"backend {redact(repr(spec))}: expected a gradtrack.Backend. {_remedy(spec)}")
            if name in built:
                raise named_twice(name)
            built[name] = backend
    except BaseException:
        for backend in built.values():
            backend.close(failed=True)
        raise
    return built


def named_twice(name: str) -> UsageError:
    """Return the error of a configuration that names a backend twice."""
    return UsageError(f"backend {name!r} is named twice: expected each once. Remove one of them.")


def _remedy(spec: object) -> str:
    """Say how to pass what is no backend."""
    if inspect.isclass(spec):
        return f"Pass an instance: {spec.__name__}()." if issubclass(spec, Backend) else "Derive it from that."
    if callable(getattr(spec, "add_scalar", None)):
        return "Pass {'name': 'tensorboard', 'writer': ...} with this writer."
    if type(spec).__module__.partition(".")[0] == "wandb":
        return "Pass {'name': 'wandb', 'run': ...} with this run."
    if callable(spec):
        return "Pass {'name': 'callable', 'log': ...} with this function."
    return "Derive its class from that."


def build(name: str, options: Mapping[str, Any]) -> Backend:
    """Make one backend."""
    return registry.backends.load_for(name, options)(**options)  # type: ignore[no-any-return]
