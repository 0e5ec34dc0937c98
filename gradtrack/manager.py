"""The manager: the one stateful coordinator between a training loop and its trackers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from gradtrack.analyzers.base import Analyzer
from gradtrack.backends.base import Backend
from gradtrack.checks import as_sequence, check_hookable, check_loss, check_model, unscale
from gradtrack.config import GradientConfig
from gradtrack.errors import ClosedError, InputTypeError, UsageError
from gradtrack.exits import CloseAtExit
from gradtrack.live import LiveAnalyzers, build_analyzers
from gradtrack.measure.measurer import Measurer
from gradtrack.monitor import GradientMonitor
from gradtrack.outcome import Outcome, talk, to_record
from gradtrack.pair import Pair
from gradtrack.protect.clipping import GradientClipper
from gradtrack.protect.nonfinite import NaNInfHandler
from gradtrack.record.history import History
from gradtrack.record.sink import Sink
from gradtrack.record.training_log import save_training_log
from gradtrack.reports import Issue, StepReport, TrainingSummary

IssueCallback = Callable[[Issue, StepReport], object]
_CLOSED = "this GradientManager is closed: expected an open one. Make a new one for another run."


class GradientManager:
    """Looks at the gradients of each training step once: keeps them safe, reports on them, and records the reports.

    `config` is a `GradientConfig`, a mapping, the path of a YAML, TOML or JSON file, or nothing; keywords override it.
    A manager is a context manager; leaving it delivers what is left. It works until it is closed.
    """

    def __init__(
        self,
        config: GradientConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        backends: Sequence[Any] | None = None,
        analyzers: Sequence[Any] | str | None = None,
        **overrides: Any,
    ) -> None:
        if backends is not None:
            overrides["backends"] = list(backends)
        if analyzers is not None:
            overrides["analyzers"] = analyzers if isinstance(analyzers, str) else list(analyzers)
        self.config = GradientConfig.load(config, **overrides)
        self._measurer = Measurer(self.config.engine)
        self.monitor, self.clipper, self.nan_inf_handler = self._components()
        self._analyzers = LiveAnalyzers(build_analyzers(self.config.analyzers))
        self._sink = Sink(self.config)
        self._history = History(self.config.max_gradient_history)
        self._pairs: dict[tuple[int, ...], Pair] = {}
        self._restored: dict[str, Any] = {}
        self._callbacks: list[IssueCallback] = []
        self._flight: list[StepReport] = []
        self._hooks: list[Any] = []
        self._closed = False
        self._at_exit = CloseAtExit(self, self._sink)

    def step(
        self,
        model: nn.Module,
        optimizer: Any,
        loss: Tensor | float | None,
        backward: bool = True,
        *,
        scaler: torch.amp.GradScaler | None = None,
        accumulate: bool = False,
        epoch: int | None = None,
        batch: object = None,
    ) -> StepReport:
        """Run the backward pass if asked, then measure, protect and report the gradients, before the optimizer steps.

        With `accumulate=True` the gradients are those of a micro-batch: nothing is measured, clipped or counted yet.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        check_loss(loss, backward)
        pair = self._pair(model, optimizer)
        if backward:
            assert isinstance(loss, Tensor)
            torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
        pair.add_loss(loss)
        if accumulate:
            return pair.unmeasured(epoch)
        if scaler is not None:
            unscale(scaler, pair.optimizers)
        outcome = pair.step(scaled=scaler is not None and scaler.is_enabled(), epoch=epoch, batch=batch)
        if not outcome.repeated:
            self._conclude(pair, outcome)
        if outcome.error is not None:
            raise outcome.error
        return outcome.report

    def attach(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        horizon: int | None = None,
        name: str | None = None,
    ) -> None:
        """Prepare for a model before its first forward pass; needed only for a second pair, which must have a name.

        `horizon` is the number of time steps over which a recurrent model has to remember.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        check_model(model)
        optimizers = as_sequence(optimizer)
        same = [pair for pair in self._pairs.values() if pair.model is model and pair.name == (name or "")]
        if same:
            self._rebind(same[0], optimizers, horizon)
            return
        self._check_name(name)
        self._add_pair(model, optimizers, name=name or "", horizon=horizon)

    def analyzer(self, name: str) -> Analyzer:
        """Return a running analyzer, for those that take observations from the training loop."""
        return self._analyzers[name]

    def backend(self, name: str) -> Backend:
        """Return a backend by its name."""
        if name not in self._sink.backends:
            there = ", ".join(self._sink.backends) or "none"
            raise UsageError(f"backend {name!r}: expected one of those configured ({there}). Add it to backends.")
        return self._sink.backends[name]

    @property
    def reports(self) -> list[StepReport]:
        """Return the last reports, at most `max_gradient_history`, the newest last."""
        return list(self._history.reports)

    @property
    def flight_recorder(self) -> list[StepReport]:
        """Return the steps up to the first fault, each with the statistics of every parameter; empty before it."""
        return list(self._flight)

    @property
    def run_dir(self) -> Path | None:
        """Return the directory of the run's files, or None where nothing is written."""
        return self._sink.directory

    def on_issue(self, callback: IssueCallback) -> IssueCallback:
        """Call `callback(issue, report)` whenever an issue opens; it may stop the training by raising."""
        if not callable(callback):
            raise InputTypeError(f"on_issue callback {callback!r}: expected a function of an issue and a report.")
        self._callbacks.append(callback)
        return callback

    def diagnose(self) -> list[Issue]:
        """Return the issues that are open now, in every pair, the most severe first."""
        found = [issue for pair in self._unique_pairs() for issue in pair.health.issues]
        return sorted(found, key=lambda issue: issue.severity, reverse=True)

    def status(self) -> dict[str, Any]:
        """Tell what was recorded, and for each backend what it has taken and what it has not, and why."""
        return {
            "run_id": self._sink.run_id,
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            "closed": self._closed,
            "steps": {pair.name or "default": pair.step_count for pair in self._unique_pairs()},
            "backends": self._sink.status(),
        }

    def get_training_summary(self) -> TrainingSummary:
        """Sum up the training so far."""
        return self._history.summary()

    def save_training_log(self, file_path: str | Path) -> Path:
        """Write the configuration, the summary and the kept reports as JSON."""
        return save_training_log(Path(file_path), self.config, self.get_training_summary(), self._history.reports)

    def plot_training_curves(self, save_path: str | Path) -> Path:
        """Draw loss, gradient norms, non-finite counts and clipping over time."""
        from gradtrack.view import plots

        return plots.plot_training_curves(self.reports, Path(save_path))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that rolls, as plain data for a checkpoint."""
        pairs = {pair.name: pair.state_dict() for pair in self._unique_pairs()}
        return {"version": 1, "pairs": {**self._restored, **pairs}, "history": self._history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned; pairs that are not there yet get theirs when they are attached."""
        if state.get("version") != 1:
            raise UsageError(
                f"state version {state.get('version')!r}: expected 1. Load it with the gradtrack that wrote it."
            )
        self._history.load_state_dict(state["history"])
        self._restored = dict(state["pairs"])
        for pair in self._unique_pairs():
            if pair.name in self._restored:
                pair.load_state_dict(self._restored.pop(pair.name))

    def follow(self, model: nn.Module, optimizer: Any) -> None:
        """Call `step` by itself just before the first optimizer's own step."""
        optimizers = as_sequence(optimizer)

        def before_step(*_: object) -> None:
            if not self._closed:
                self.step(model, optimizers, None, False)

        self._hooks.append(optimizers[0].register_step_pre_hook(before_step))

    def flush(self) -> None:
        """Make everything that was recorded durable."""
        self._sink.flush()

    def close(self, *, failed: bool = False) -> None:
        """Deliver what is left and let go of model, optimizers and backends; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._at_exit.cancel()
        for hook in self._hooks:
            hook.remove()
        for pair in self._unique_pairs():
            pair.close_hooks()
            pair.analyzers.close()
        self._sink.close(failed=failed)
        self._pairs.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def _pair(self, model: nn.Module, optimizer: Any) -> Pair:
        pair = self._pairs.get((id(model), id(optimizer)))
        if pair is not None:
            return pair
        optimizers = as_sequence(optimizer)
        key = (id(model), *map(id, optimizers))
        if key not in self._pairs:
            self._meet(model, optimizers)
        return self._pairs[key]

    def _meet(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        """Make the first pair, or complete one that was attached without its optimizers."""
        check_model(model)
        waiting = [pair for pair in self._pairs.values() if pair.model is model and not pair.optimizers]
        if waiting:
            self._rebind(waiting[0], optimizers, waiting[0].horizon)
        elif self._pairs:
            raise UsageError(
                f"a second (model, optimizer) pair, of {type(model).__name__}: expected it to have a name. "
                "Call manager.attach(model, optimizer, name='...') before its first step; "
                "after replacing the optimizer of the first pair, call manager.attach(model, optimizer)."
            )
        else:
            self._add_pair(model, optimizers, name="", horizon=None)

    def _add_pair(self, model: nn.Module, optimizers: Sequence[Any], *, name: str, horizon: int | None) -> None:
        first = not self._pairs
        components = (self.monitor, self.clipper, self.nan_inf_handler) if first else self._components()
        analyzers = self._analyzers if first else LiveAnalyzers(build_analyzers(_rebuildable(self.config.analyzers)))
        if self.config.analyzers == "auto":
            analyzers.choose(model)
        pair = Pair(
            model,
            optimizers,
            config=self.config,
            measurer=self._measurer,
            components=components,
            analyzers=analyzers,
            name=name,
            horizon=horizon,
        )
        if name in self._restored:
            pair.load_state_dict(self._restored.pop(name))
        analyzers.arm(model, pair.step_count + 1)
        self._pairs[(id(model), *map(id, optimizers))] = pair

    def _rebind(self, pair: Pair, optimizers: Sequence[Any], horizon: int | None) -> None:
        if optimizers:
            pair.bind(optimizers)
        pair.horizon = horizon if horizon is not None else pair.horizon
        self._pairs = {key: value for key, value in self._pairs.items() if value is not pair}
        self._pairs[(id(pair.model), *map(id, pair.optimizers))] = pair

    def _check_name(self, name: str | None) -> None:
        taken = {pair.name for pair in self._pairs.values()}
        if self._pairs and not name:
            raise UsageError(
                "a second (model, optimizer) pair: expected a name. Call attach(model, optimizer, name='...')."
            )
        if (name or "") in taken:
            raise UsageError(f"pair name {name!r} is taken: expected another one. Names in use: {sorted(taken)}.")

    def _conclude(self, pair: Pair, outcome: Outcome) -> None:
        """Keep and record a step, then tell the callbacks, who may stop the training."""
        report, facts = outcome.report, outcome.facts
        healthy = facts.health.healthy
        self._history.resize(self.config.max_gradient_history)
        self._history.append(report, norm=outcome.norm, clipped=outcome.clipped, skipped=facts.skipped, healthy=healthy)
        if "nan_count" in facts.nan_inf:
            self._history.add_nonfinite(facts.nan_inf)
        for issue in outcome.issues:
            self._history.add_issue(issue.issue_type.value)
        if not healthy and not self._flight:
            self._flight = pair.flight_recorder()
        if outcome.event:
            self._sink.write(to_record(outcome, self.config))
            talk(outcome, self.config)
        for issue in outcome.opened:
            for callback in self._callbacks:
                callback(issue, report)

    def _components(self) -> tuple[GradientMonitor, GradientClipper, NaNInfHandler]:
        return (
            GradientMonitor(self.config, measurer=self._measurer),
            GradientClipper(self.config, measurer=self._measurer),
            NaNInfHandler(self.config, measurer=self._measurer),
        )

    def _unique_pairs(self) -> list[Pair]:
        return list(dict.fromkeys(self._pairs.values()))


def _rebuildable(specs: Any) -> Any:
    """Leave out instances, which belong to the first pair."""
    return specs if isinstance(specs, str) else [spec for spec in specs if isinstance(spec, (str, dict))]


def safe_backward(
    loss: Tensor,
    model: nn.Module,
    optimizer: Any,
    gradient_manager: GradientManager | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    accumulate: bool = False,
    epoch: int | None = None,
    batch: object = None,
) -> StepReport:
    """Run the backward pass and make its gradients safe to step with; call it in place of `loss.backward()`.

    Without a manager a model gets one of its own with the default configuration, which lives as long as the model does.
    """
    manager = gradient_manager if gradient_manager is not None else _default_manager(model)
    return manager.step(model, optimizer, loss, True, scaler=scaler, accumulate=accumulate, epoch=epoch, batch=batch)


_DEFAULT_MANAGERS: weakref.WeakKeyDictionary[nn.Module, GradientManager] = weakref.WeakKeyDictionary()


def _default_manager(model: nn.Module) -> GradientManager:
    check_model(model)
    if model not in _DEFAULT_MANAGERS:
        _DEFAULT_MANAGERS[model] = GradientManager()
    return _DEFAULT_MANAGERS[model]


def create_gradient_manager(
    max_grad_norm: float = 1.0,
    enable_monitoring: bool = True,
    enable_nan_inf_check: bool = True,
    verbose: bool = False,
    **settings: Any,
) -> GradientManager:
    """Make a manager from the settings that most people change; any other setting of `GradientConfig` works as well."""
    return GradientManager(
        max_grad_norm=max_grad_norm,
        enable_gradient_monitoring=enable_monitoring,
        enable_nan_inf_check=enable_nan_inf_check,
        verbose_logging=verbose,
        **settings,
    )


def watch(
    model: nn.Module,
    optimizer: Any,
    config: GradientConfig | Mapping[str, Any] | str | Path | None = None,
    **settings: Any,
) -> GradientManager:
    """Measure, protect and report before every step of an optimizer, with no other change to the training loop.

    Of several optimizers the first one's step is the step. Close the manager, or let the interpreter's exit do it.
    """
    optimizers = as_sequence(optimizer)
    for one in optimizers:
        check_hookable(one)
    manager = GradientManager(config, **settings)
    manager.attach(model, optimizers)
    manager.follow(model, optimizers)
    return manager
