"""The (model, optimizer) pairs of a manager, and which pair owns the parameters that their models share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from gradtrack.analyzers.base import check_horizon
from gradtrack.config import GradientConfig
from gradtrack.delivery.run import Sink
from gradtrack.errors import UsageError
from gradtrack.gradients.distributed.shards import unwrapped
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.parameters import NamedParameter
from gradtrack.health.monitor import GradientMonitor
from gradtrack.protection.clipping import GradientClipper
from gradtrack.protection.nonfinite import NaNInfHandler
from gradtrack.protection.spikes import Rollback
from gradtrack.reports import Issue, StepReport
from gradtrack.step.analyzers import RunningAnalyzers, build_analyzers
from gradtrack.step.arguments import as_sequence, check_model, labels_of
from gradtrack.step.data import Recorder, Recorders, StepData
from gradtrack.step.history import History
from gradtrack.step.measure import Measurement
from gradtrack.step.pair import Components, IssueCallback, Pair
from gradtrack.step.rows import Rows
from gradtrack.support.interrupts import pass_on

_logger = logging.getLogger("gradtrack")
_OnModel = Measurement | RunningAnalyzers | Recorder
"""What places hooks on a model."""


class Shares:
    """The division of parameters among pairs, so that every gradient is measured and clipped once.

    A parameter belongs to the pairs whose optimizers own it, and one that no optimizer owns to the first pair whose
    model has it. Pairs whose optimizers own the same parameter step it in turns; each measures it before its own step.
    """

    def __init__(self) -> None:
        self._known: tuple[object, ...] = ()
        self._elsewhere: list[frozenset[int]] = []

    def elsewhere(self, pair: Pair, pairs: Sequence[Pair]) -> frozenset[int]:
        """Return the ids of those parameters of a pair that other pairs measure."""
        tables = [one.table for one in pairs]
        owned = [list(map(id, one.owned())) for one in pairs]
        if (tables, owned) != self._known:
            self._known = tables, owned
            within = [set(map(id, unwrapped(one.model).parameters())) for one in pairs]
            held = [list(map(id, table.everything)) for table in tables]
            self._elsewhere = [
                left | {key for key in ids if key not in mine and any(key in other for other in within)}
                for left, ids, mine in zip(divide(held, owned), held, within, strict=True)
            ]
        return self._elsewhere[pairs.index(pair)]


def divide(held: Sequence[Iterable[int]], owned: Sequence[Iterable[int]]) -> list[frozenset[int]]:
    """Return for each pair the ids of the parameters in its model that other pairs measure, by their optimizers."""
    owners = [frozenset(ids) for ids in owned]
    taken = frozenset().union(*owners)
    found = []
    for ids, own in zip(held, owners, strict=True):
        mine = frozenset(ids)
        found.append((mine & taken) - own)
        taken |= mine
    return found


class Pairs:
    """The pairs by their model and optimizers: the first one needs no name, every further one does.

    Where their models share parameters, each pair measures those that its own optimizers own.

    The components and analyzers of the first pair exist before the pair does, so that a manager can return them;
    `sink` is told when the first pair is added, and has the directory for what is kept of single steps.
    """

    def __init__(
        self,
        config: GradientConfig,
        process_group: Any = None,
        *,
        history: History | None = None,
        rows: Rows | None = None,
        callbacks: Sequence[IssueCallback] = (),
        rollbacks: Sequence[Rollback] = (),
        sink: Sink | None = None,
    ) -> None:
        self._config, self._process_group, self._sink = config, process_group, sink
        self._history, self._rows, self._callbacks = history, rows, callbacks
        self._rollbacks = rollbacks
        self._components_are_shared = False
        self._measurer = Measurer(config.engine)
        self.first_components = self._components()
        self.first_analyzers = self._analyzers(config.analyzers)
        self._pairs: dict[tuple[int, ...], Pair] = {}
        self._shares = Shares()
        self._on_models: list[_OnModel] = []
        self._restored: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs.values())

    def find(self, model: nn.Module, optimizer: Any) -> Pair:
        """Return the pair of a model and its optimizers; add it if it is the first one."""
        pair = self._pairs.get((id(model), id(optimizer)))
        if pair is not None:
            return pair
        optimizers = as_sequence(optimizer)
        pair = self._pairs.get((id(model), *map(id, optimizers)))
        return pair if pair is not None else self._add_or_rebind(model, optimizers)

    def settle(self) -> None:
        """Apply the pending steps of every pair."""
        for pair in self:
            pair.pending.settle()

    def interrupt(self) -> None:
        """Apply the pending steps of every pair, and close the fast path for the next step."""
        for pair in self:
            pair.fast_path.close()

    def share_components(self) -> Components:
        """Return monitor, clipper and handler of the first pair, to which every step is applied at once from now on."""
        self._components_are_shared = True
        for pair in self:
            if pair.monitor is self.first_components[0]:
                pair.share_components()
        return self.first_components

    def has(self, model: nn.Module, optimizer: Any) -> bool:
        """Whether there is a pair of a model and its optimizers."""
        return (id(model), *map(id, as_sequence(optimizer))) in self._pairs

    def attach(
        self, model: nn.Module, optimizer: Any, *, horizon: int | None, name: str, process_group: Any = None
    ) -> Pair:
        """Add a pair under a name, or set the optimizers or the horizon of a known one."""
        self.interrupt()
        check_model(model)
        horizon = check_horizon(horizon)
        optimizers = as_sequence(optimizer)
        for pair in self:
            if pair.model is model and pair.name == name:
                if process_group is not None:
                    pair.measurement.share(process_group)
                found = self._rebind(pair, optimizers, horizon)
                break
        else:
            self._check_name(name, optimizers)
            found = self._add(model, optimizers, name=name, horizon=horizon, process_group=process_group)
        found.watch(running=False)
        return found

    def named(self, name: str) -> Pair:
        """Return the pair of a name; the first one's may be empty."""
        for pair in self:
            if pair.name == name:
                return pair
        known = ", ".join(repr(pair.name) for pair in self) or "none"
        raise UsageError(f"pair {name!r}: expected one that is attached ({known}). Call manager.attach first.")

    def state_dict(self, *, checkpoint: bool = True) -> dict[str, Any]:
        """Return the state of every pair, by its name."""
        return {**self._restored, **{pair.name: pair.state_dict(checkpoint=checkpoint) for pair in self}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the state of a pair that is added later is kept until then."""
        self._restored = dict(state)
        for pair in self:
            self._restore(pair)

    def end(self) -> None:
        """Judge every pair once more, and record its last step unless it has made a row and nothing has changed."""
        for pair in self:
            if (last := pair.flight_recorder.last) is not None:
                self._end(pair, *last)

    def _end(self, pair: Pair, report: StepReport, data: StepData) -> None:
        report.resolve()  # with the health that it had
        recorded = data.event or report.step != pair.step_count  # a signal handler may close within a step
        data.step, data.epoch, data.source = report.step, report.epoch, pair.name
        data.opened = tuple[Issue, ...]()
        data.event = False
        if pair.analyzers and not pair.measurement.has_shards:
            pair.judge.add_analyzer_issues(pair.analyzers.issues(), data)
        later = report
        if data.event:
            later = report.model_copy(update={"health": data.health})
            pair.history.replace(report, later, data.opened)
            pair.flight_recorder.replace_last(later)
            if not (data.health.healthy or pair.history.first_fault):
                pair.history.first_fault = pair.flight_recorder.read()
        if self._rows is not None and (data.event or not recorded):
            data.event, data.time = True, time.time() if recorded else report.time
            self._rows.record(later, data, lambda: pair.analyzers.panels)
        for issue in data.opened:
            for callback in self._callbacks:
                try:  # no training is left that it could stop
                    callback(issue, later)
                except Exception as fault:
                    pass_on(fault)
                    _logger.exception("a callback failed on %s, found at the end of the training", issue.key)

    def close(self) -> None:
        """Remove every hook from models and optimizers."""
        for pair in self:
            pair.close()

    def models_alone(self) -> Callable[[], None]:
        """Return a function that removes the hooks from the models without keeping the optimizers alive."""
        return partial(_close_all, self._on_models)

    def _add_or_rebind(self, model: nn.Module, optimizers: Sequence[Any]) -> Pair:
        """Return the pair of a new (model, optimizers): one that was attached without optimizers, or the first."""
        self.interrupt()
        check_model(model)
        without_optimizers = [pair for pair in self if pair.model is model and not pair.optimizers]
        if without_optimizers:
            return self._rebind(without_optimizers[0], optimizers, None)
        if self._pairs:
            raise UsageError(
                f"a second (model, optimizer) pair, of {type(model).__name__}: expected it to have a name. "
                "Call manager.attach(model, optimizer, name='...') before its first step; "
                "after replacing the optimizer of the first pair, call manager.attach(model, optimizer)."
            )
        pair = self._add(model, optimizers)
        pair.analyzers.unhooked_step = pair.step_count + 1
        return pair

    def _add(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        *,
        name: str = "",
        horizon: int | None = None,
        process_group: Any = None,
    ) -> Pair:
        first = not self._pairs
        specs = self._config.analyzers
        if not isinstance(specs, str):  # those that were passed as instances belong to the first pair
            specs = [spec for spec in specs if isinstance(spec, (str, dict))]
        analyzers = self.first_analyzers if first else self._analyzers(specs)
        pair = Pair(
            model,
            config=self._config,
            measurer=self._measurer,
            components=self.first_components if first else self._components(),
            analyzers=analyzers,
            name=name,
            horizon=horizon,
            process_group=process_group if process_group is not None else self._process_group,
            history=self._history,
            rows=self._rows,
            callbacks=self._callbacks,
            rollbacks=self._rollbacks,
        )
        key = (id(model), *map(id, optimizers))
        try:
            pair.bind(optimizers)
            if self._config.analyzers == "auto":
                analyzers.choose(model)
            if first and self._components_are_shared:
                pair.share_components()
            if not name:  # of several models each has only some of what the options name
                analyzers.check(model)
            self._restore(pair)
            pair.arm()
            self._pairs[key] = pair
            self._divide()
            self._on_models += (pair.measurement, pair.analyzers)
            if self._sink is not None:
                pair.recorders = _recorders(pair, self._sink)
                self._on_models += pair.recorders
                if first:
                    self._sink.prepare()
        except BaseException:  # an interrupt: the pair is added anew by the next call
            self._pairs.pop(key, None)
            pair.close()
            raise
        return pair

    def _divide(self) -> None:
        """Divide the parameters among the pairs: each measures its own, once there are several pairs."""
        pairs = list(self)
        for pair in pairs if len(pairs) > 1 else ():
            pair.measurement.elsewhere = partial(self._shares.elsewhere, pair, pairs)
            pair.named_elsewhere = partial(_named, [other for other in pairs if other is not pair])
        for pair in pairs:
            pair.measurement.divide()

    def _rebind(self, pair: Pair, optimizers: Sequence[Any], horizon: int | None) -> Pair:
        if optimizers:
            pair.bind(optimizers)
        pair.horizon = horizon if horizon is not None else pair.horizon
        self._pairs = {key: value for key, value in self._pairs.items() if value is not pair}
        self._pairs[(id(pair.model), *map(id, pair.optimizers))] = pair
        self._divide()
        return pair

    def _restore(self, pair: Pair) -> None:
        if pair.name in self._restored:
            pair.load_state_dict(self._restored[pair.name])

    def _check_name(self, name: str, optimizers: Sequence[Any]) -> None:
        taken = sorted(pair.name for pair in self)
        if taken and not name:
            raise UsageError("a second (model, optimizer) pair: expected a name. Pass name='...' to attach.")
        if name in self._plain_groups(optimizers):
            raise UsageError(
                f"pair name {name!r} is also a group of the unnamed pair: expected another one, "
                "since both would write the same metrics. Choose another name."
            )
        if name in taken:
            raise UsageError(f"pair name {name!r} is taken: expected another one. Names in use: {taken}.")

    def _plain_groups(self, newcomers: Sequence[Any]) -> set[str]:
        """Return the groups of the unnamed pair, without the parameters that these optimizers own."""
        taken = {
            id(param) for one in newcomers for group in getattr(one, "param_groups", ()) for param in group["params"]
        }
        return {
            pair.table.group_names[group]
            for pair in self
            if not pair.name
            for param, group in zip(pair.table.params, pair.table.group_of.tolist(), strict=True)
            if id(param) not in taken
        }

    def _analyzers(self, specs: Any) -> RunningAnalyzers:
        return RunningAnalyzers(build_analyzers(specs), open_to_more=self._config.analyzers == "auto")

    def _components(self) -> Components:
        return (
            GradientMonitor(self._config, measurer=self._measurer),
            GradientClipper(self._config, measurer=self._measurer),
            NaNInfHandler(self._config, measurer=self._measurer),
        )


def _named(pairs: Iterable[Pair]) -> list[NamedParameter]:
    """Return what the parameters of pairs are called, frozen ones too."""
    return [one for pair in pairs for some in pair.table.named(labels_of(pair.optimizers)) for one in some]


def _recorders(pair: Pair, sink: Sink) -> Recorders:
    """Return what keeps single steps of a pair in full, as far as the configuration asks for it."""
    found, config = list[Recorder](), pair.config
    wanted = [name for name, off in (("capture", "off"), ("fingerprints", 0)) if getattr(config, name) != off]
    if wanted and not sink.keeps_files:
        _logger.warning("%s: nothing is kept, since the run has no directory. Set run_dir.", " and ".join(wanted))
        return Recorders()
    if "capture" in wanted:
        from gradtrack.capture import Capture

        found.append(Capture(pair, sink.shared_place))
    if "fingerprints" in wanted:
        from gradtrack.fingerprints import Fingerprints

        found.append(Fingerprints(pair, sink.shared_place))
    return Recorders(found)


def _close_all(parts: Sequence[_OnModel]) -> None:
    for part in parts:
        part.close()
