"""Where a configuration would send its records and post its issues, found out without creating anything."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from gradtrack import registry
from gradtrack._version import __version__
from gradtrack.config import GradientConfig
from gradtrack.delivery.run import build_alerts, named_twice, plain_options
from gradtrack.delivery.run_files import ensure_writable
from gradtrack.delivery.status import describe
from gradtrack.errors import GradtrackError, MissingExtraError, UsageError
from gradtrack.support.rank import process_rank
from gradtrack.support.redact import redact, redact_values

State = Literal["ready", "not configured", "not installed", "unreachable", "silent", "broken"]
_TIMEOUT_SECONDS: Final = 20.0
"""Long enough for a cold start of a tracker's package; a server that is silent is given up by its backend sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendState:
    """One backend: whether the configuration names it, whether it could be used, where to, or why not."""

    name: str
    configured: bool
    state: State
    destination: str = ""
    reason: str = ""
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginState:
    """An analyzer or an alert of the configuration: whether it could be used, what it would post, or why not."""

    name: str
    state: State
    destination: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is installed, what a configuration resolves to, and what would be attached; no secrets."""

    versions: Mapping[str, str]
    rank: int
    config: Mapping[str, Any]
    run_dir: str
    run_dir_fault: str
    backends: tuple[BackendState, ...]
    analyzers: tuple[PluginState, ...]
    alerts: tuple[PluginState, ...]

    @property
    def healthy(self) -> bool:
        """Whether the run directory and everything that the configuration names can be used."""
        states = [one.state for one in self.backends if one.configured]
        states += [one.state for one in (*self.analyzers, *self.alerts)]
        return not self.run_dir_fault and all(state == "ready" for state in states)


def examine(
    config: GradientConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> Diagnosis:
    """Look at every installed backend, those of the configuration first, and at its analyzers and alerts.

    Each is waited for only so long. Nothing is posted: an alert that is ready has all that it needs for it.
    """
    resolved = GradientConfig.load(config)
    specs: dict[str, list[object]] = {}
    for spec in resolved.backends:
        specs.setdefault(registry.backends.name_of(spec), []).append(spec)
    names = [*specs, *(name for name in registry.backends.names() if name not in specs)]
    return Diagnosis(
        versions={"gradtrack": __version__, "torch": torch.__version__, "python": platform.python_version()},
        rank=process_rank(),
        config=redact_values(resolved.model_dump(mode="json", exclude={"backends", "analyzers", "alerts"})),
        run_dir="" if resolved.run_dir is None else str(resolved.run_dir),
        run_dir_fault=_run_dir_fault(resolved.run_dir),
        backends=tuple(_examine(name, specs.get(name, []), timeout_seconds) for name in names),
        analyzers=tuple(
            _state_of(registry.analyzers, spec, _check_analyzer, timeout_seconds)
            for spec in ([] if isinstance(resolved.analyzers, str) else resolved.analyzers)
        ),
        alerts=tuple(_state_of(registry.alerts, spec, _make_alert, timeout_seconds) for spec in resolved.alerts),
    )


def _examine(name: str, specs: Sequence[object], timeout_seconds: float) -> BackendState:
    spec = specs[0] if specs else name
    named = registry.split_spec(spec, "backend")
    options = {} if named is None else named[1]
    state: State
    if len(specs) > 1:
        state, text = "broken", describe(named_twice(name))
    elif named is None:
        state, text = "ready", f"the given {type(spec).__name__}"
    else:
        state, text = _ask(lambda: registry.backends.load_for(name, options).probe(**options), timeout_seconds)
    if not specs and state not in ("ready", "not installed"):
        state = "not configured"  # what would stop it is no fault of a configuration that does not name it
    return BackendState(
        name=name,
        configured=bool(specs),
        state=state,
        destination=redact(text) if state == "ready" else "",
        reason="" if state == "ready" else text,
        options=plain_options(options),
    )


def _state_of(
    known: registry.Registry, spec: object, question: Callable[[object], str], timeout_seconds: float
) -> PluginState:
    state, text = _ask(lambda: question(spec), timeout_seconds)
    is_ready = state == "ready"
    return PluginState(name=known.name_of(spec), state=state, destination=text * is_ready, reason=text * (not is_ready))


def _check_analyzer(spec: object) -> str:
    """Check the options of an analyzer as a manager does; its values it checks itself, where it is made."""
    named = registry.split_spec(spec, "analyzer")
    if named is not None:
        registry.analyzers.load_for(*named)
    return ""


def _make_alert(spec: object) -> str:
    """Make an alert as a manager would, which shows what its address and its options lack, and say what it posts."""
    (worker,) = build_alerts([spec]).values()
    if registry.split_spec(spec, "alert") is not None:  # an instance is the user's
        worker.join(0.0)
    return f"issues of {worker.min_severity.value} and above"


def _ask(question: Callable[[], object], timeout_seconds: float) -> tuple[State, str]:
    """Ask a plugin what it would do, on a thread that may be left behind."""
    found: list[tuple[State, str]] = []
    thread = threading.Thread(target=lambda: found.append(_answer(question)), daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return found[0] if found else ("silent", f"no answer within {timeout_seconds:g} seconds")


def _answer(question: Callable[[], object]) -> tuple[State, str]:
    try:
        return "ready", str(question())
    except MissingExtraError as fault:
        return "not installed", fault.command
    except BaseException as fault:  # a plugin that exits must not end the examination
        unreachable = isinstance(fault, GradtrackError) and not isinstance(fault, UsageError)
        return "unreachable" if unreachable else "broken", describe(fault)


def _run_dir_fault(run_dir: Path | None) -> str:
    """Say why a run directory could not be written; one that does not exist yet is left that way."""
    if run_dir is None:
        return ""
    nearest = next(parent for parent in (run_dir.absolute(), *run_dir.absolute().parents) if parent.exists())
    try:
        ensure_writable(nearest)
    except GradtrackError as fault:
        return str(fault)
    return ""
