"""Stage 4: runs the analyzers that are due: schedule, hooks, faults, and eager steps of compiled models."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import nn

from gradtrack import registry
from gradtrack.analyzers.base import OFTEN_EVERY, OFTEN_UNTIL, Analyzer, Snapshot, often, rarely
from gradtrack.analyzers.tools.hooks import EagerSteps, unheard
from gradtrack.analyzers.tools.modules import is_compiled
from gradtrack.errors import InputTypeError, UsageError
from gradtrack.gradients.distributed.shards import unwrapped
from gradtrack.records import Panel
from gradtrack.reports import Issue, IssueSeverity, IssueType, Report
from gradtrack.support.interrupts import pass_on
from gradtrack.support.redact import redact

_logger = logging.getLogger("gradtrack")
_PATIENCE, _VERDICTS = 3, "verdicts"
_NOT_WHOLE = "{}: left out, since parameters that are spread over ranks are not whole here."
_NOT_EVERYWHERE = "{}: left out, since it has to run on every rank that shares the parameters."
_LIMITED = "analyzer {} can do nothing here, because {}"
_LONGEST, _CLOSE, _EVERY = 500, 16, "every"
_EAGER = "the model is compiled: steps at which an analyzer looks inside it run eagerly; nothing is compiled again."


class RunningAnalyzers:
    """Runs analyzers beside a training. One that fails is left out after three faults and never stops the training.

    Where analyzers are chosen by themselves (`open_to_more`), one that is asked for by name joins them.
    """

    def __init__(self, analyzers: Mapping[str, Analyzer], *, open_to_more: bool = False) -> None:
        self.running = dict(analyzers)
        """The analyzers by name."""
        self.open = open_to_more
        self._faults: dict[str, int] = {}
        self.armed: set[str] = set()
        """The analyzers that look at the coming step."""
        self._alerts: Sequence[int] = ()
        self.close_steps: Sequence[int] = ()
        """The steps after an alert on which the cheap analyzers run."""
        self.first_step = -1
        """The first step after a checkpoint: analyzers that look rarely would be silent for a thousand steps."""
        self.unhooked_step = -1
        """The step whose forward pass ran before the hooks were there, since the pair was met within it."""
        self._idle, self._looked = set[str](), set[str]()
        self._sharing: dict[str, Analyzer] = {}
        self._sums: dict[str, Sequence[float] | None] = {}
        self.verdicts: list[Issue] | None = None
        """The issues on which all ranks have just agreed; None at most steps."""
        self.eager, self._told_eager, self._judges = EagerSteps(), False, False
        self.chosen: list[str] = []
        self.caveat_taker: Callable[[], Callable[[list[str]], object] | None] = lambda: None
        self._judged: set[str] = set()
        """The analyzers of which it is known whether they see anything of the model."""
        self._found: dict[str, list[Issue]] = {}

    def __getitem__(self, name: str) -> Analyzer:
        if name not in self.running and self.open and name in registry.analyzers.builtin():
            self.running[name] = registry.analyzers.load(name)()
        if name not in self.running:
            there, known = ", ".join(self.running) or "none", registry.analyzers.names()
            add = f" Add {name!r} to analyzers in the configuration."
            remedy = add if name in known else registry.nearest(name, known)
            raise UsageError(f"analyzer {name!r}: expected one of those configured ({there}).{remedy}")
        return self.running[name]

    def __bool__(self) -> bool:
        return bool(self.running)

    @property
    def panels(self) -> list[Panel]:
        """Return the dashboard panels of the analyzers."""
        found = (self._run_safely(name, lambda one=one: list(one.panels)) for name, one in list(self.running.items()))
        return [panel for panels in found for panel in panels or ()]

    def choose(self, model: nn.Module) -> None:
        """Add every built-in analyzer that suits a model, and say why."""
        model = unwrapped(model)
        for name in registry.analyzers.builtin():
            found = registry.analyzers.load(name)
            reason = found.suits(model)
            if reason is not None and name not in self.running:
                self.running[name] = found()
                self.chosen.append(f"analyzer {name} was chosen: {reason}.")

    def check(self, model: nn.Module) -> None:
        """Have every analyzer refuse options that name what a model does not have."""
        for analyzer in self.running.values():
            analyzer.check(unwrapped(model))

    def alert(self, step: int) -> None:
        """Make every analyzer due at a step after an issue or a jump, and the cheap ones for a while after it."""
        self._alerts = (*self._alerts[-1:], step)  # analyzers with hooks on the step before have yet to run
        if step > OFTEN_UNTIL and step not in self.close_steps:  # until then the schedule runs them as often
            self.close_steps = range(step, step + _CLOSE, OFTEN_EVERY)

    @property
    def local(self) -> bool:
        """Whether any analyzer reports numbers of this rank alone."""
        return any(not one.adds_up for name, one in self.running.items() if name not in self._idle)

    @property
    def offers(self) -> list[str]:
        """Name the numbers that can be added up over ranks: those of some analyzers, and the verdicts of all."""
        return [*(name for name, one in self.running.items() if one.adds_up), *([_VERDICTS] if self else [])]

    def share(self, names: Iterable[str]) -> None:
        """Add up the numbers that all ranks offer from now on, even if an analyzer fails on this rank later."""
        self._judges = _VERDICTS in (wanted := set(names))
        names = sorted(wanted - {_VERDICTS})
        self._sharing = {name: self.running.get(name) or self._sharing[name] for name in names}
        self._idle.difference_update(names)

    def adds_up(self, step: int) -> bool:
        """Say whether ranks add up numbers of analyzers at a step."""
        numbers = any(one.num_sums(step, 0) for one in self._sharing.values())
        return numbers or (self._judges and exchanges_verdicts(step))

    def contribute(
        self, step: int, groups: Sequence[str], snapshot: Callable[[], Snapshot]
    ) -> tuple[list[float], Callable[[Sequence[float], int], None]]:
        """Return the numbers that ranks add up at a step, and a function that sets the sums over a number of ranks."""
        sizes = {name: size for name, one in self._sharing.items() if (size := one.num_sums(step, len(groups)))}
        judged, found = self._judges and exchanges_verdicts(step), list[float]()
        shown = snapshot() if sizes else None
        for name, size in sizes.items():
            found += self._numbers(name, size, shown, groups)
        start = len(found)
        found += pack(self.issues()) if judged else []

        def take(sums: Sequence[float], num_ranks: int) -> None:
            """Set the sums of the analyzers to which every rank has contributed."""
            place = 0
            for name, size in sizes.items():
                whole = round(sums[place]) == num_ranks
                self._sums[name] = list(sums[place + 1 : place + 1 + size]) if whole else None
                place += size + 1
            self.verdicts = unpack(sums[start:], num_ranks, step) if judged else None

        return found, take

    def _numbers(self, name: str, size: int, snapshot: Any, groups: Sequence[str]) -> list[float]:
        """Return a one and the numbers of an analyzer; only zeros if it has none on this rank."""
        analyzer = self.running.get(name)
        numbers = None if analyzer is None else self._run_safely(name, lambda: list(analyzer.sums(snapshot, groups)))
        return [1.0, *numbers] if numbers and len(numbers) == size else [0.0] * (size + 1)

    def leave_out_incomplete(self) -> list[str]:
        """Stop running the analyzers that need whole parameters or every rank; return notes on those that stop now.

        Where parameters are spread over ranks they would have to be gathered, and the other ranks would wait for a
        rank whose analyzer has failed.
        """
        alone = [name for name, one in self.running.items() if one.adds_up and name not in self._sharing]
        split = [name for name, one in self.running.items() if one.needs_whole_parameters]
        notes = []
        for names, text in ((split, _NOT_WHOLE), (alone, _NOT_EVERYWHERE)):
            new = [name for name in names if name not in self._idle]
            self._idle.update(new)
            for name in new:
                self._disarm(name)
            notes += [text.format(" and ".join(new))] if new else []
        return notes

    def arm(self, model: nn.Module, step: int) -> None:
        """Register the hooks of the analyzers that are due at the coming step; a compiled model runs it eagerly."""
        self.eager.end()
        for name in list(self.armed):  # they were registered for another step
            self._disarm(name)
        due = self._due(step)
        if not due:
            return
        inner = unwrapped(model)
        for name, analyzer in due:
            self.armed.add(name)
            self._run_safely(name, lambda analyzer=analyzer: analyzer.arm(inner))
        if any(type(one).arm is not Analyzer.arm for _, one in due) and any(map(is_compiled, model.modules())):
            self.eager.begin()
            self.chosen += [] if self._told_eager else [_EAGER]
            self._told_eager = True

    def backward(self, loss: Any) -> Any:
        """Show a loss to the analyzers that are due, and return the context of its backward pass."""
        for name in self.armed & self.running.keys():
            self._run_safely(name, lambda name=name: self.running[name].before_backward(loss))
        return self.eager.backward()

    def inspect(self, snapshot: Snapshot) -> tuple[dict[str, Report], list[str]]:
        """Run the analyzers that are due at a step; return their reports and notes, also on why some see nothing."""
        self.eager.end()
        reports, notes, caveats = dict[str, Report](), list[str](), list[str]()
        self._looked.clear()
        for name, analyzer in self._due(snapshot.step):
            self._looked.add(name)
            shown = self._shown_to(name, snapshot)
            with unheard():  # the hooks of other analyzers are still registered
                report = self._run_safely(name, lambda analyzer=analyzer, shown=shown: _usable(analyzer.inspect(shown)))
            hooked = name in self.armed and snapshot.step != self.unhooked_step
            reason = self._run_safely(name, analyzer.limitation) if hooked else None
            self._disarm(name)
            if isinstance(report, Report):
                reports[name] = report
            notes += self._run_safely(name, analyzer.notes) or []
            if name not in self._judged and (isinstance(reason, str) or isinstance(report, Report)):
                self._judged.add(name)
                caveats += [_LIMITED.format(name, reason)] if isinstance(reason, str) else []
        if (add := self.caveat_taker()) is not None:
            add(caveats)
        left_out, self.chosen = self.chosen, []
        return reports, [*notes, *caveats, *left_out]

    def _shown_to(self, name: str, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the analyzer's sums; faults of its callback in an optimizer's step are counted."""
        call = snapshot.call_before_step
        if self._sharing:
            snapshot = replace(snapshot, sums=self._sums.pop(name, None))
        if call is None:
            return snapshot
        return replace(snapshot, call_before_step=lambda look: call(lambda: self._run_safely(name, look)))

    def issues(self) -> list[Issue]:
        """Return the issues found by all running analyzers."""
        found = (self._run_safely(name, analyzer.issues) for name, analyzer in list(self.running.items()))
        return [issue for issues in found for issue in issues or ()]

    def issues_at_looks(self) -> list[Issue]:
        """Return what each analyzer found at its last look; only those that have just looked are asked."""
        for name, analyzer in list(self.running.items()):
            if name in self._looked or name not in self._found:
                self._found[name] = self._run_safely(name, analyzer.issues) or []
        return [issue for name in list(self.running) for issue in self._found.get(name, ())]

    def due(self, step: int) -> bool:
        """Say whether any analyzer is due at a step; the answer may change with the steps that it has analyzed."""
        return bool(self._due(step))

    def quiet_until(self, step: int, most: int) -> int:
        """Return the first step from `step` on, or the one after `most` steps, at which any analyzer may be due."""
        running = [one for name, one in list(self.running.items()) if name not in self._idle]
        if not all(one.foresees or type(one).due is Analyzer.due for one in running):
            return step
        return next((coming for coming in range(step, step + most) if self._due(coming)), step + most)

    def _due(self, step: int) -> list[tuple[str, Analyzer]]:
        """Return the analyzers that are due at a step; nearly every step of a training asks this twice."""
        alerted, close = step in self._alerts, step in self.close_steps
        found, faulty = [], []
        for name, one in list(self.running.items()):  # a hook in another thread may remove an analyzer
            if name in self._idle:
                continue
            try:
                schedule = type(one).schedule if one.looks_every is None else None
                soon = (close and schedule is often) or (step == self.first_step and schedule is rarely)
                if alerted or soon or one.due(step):
                    found.append((name, one))
            except Exception as fault:
                pass_on(fault)
                faulty.append((name, fault))
        for name, reason in faulty:
            self._count_fault(name, reason)
        return found

    def close(self) -> None:
        """Remove the hooks of all analyzers."""
        self.eager.end()
        for name in list(self.running):
            self._disarm(name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each analyzer, by its name."""
        return {name: self._run_safely(name, one.state_dict) or {} for name, one in list(self.running.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._found.clear()
        for name, analyzer in list(self.running.items()):
            if state.get(name):
                self._run_safely(name, lambda analyzer=analyzer, own=state[name]: analyzer.load_state_dict(own))

    def _disarm(self, name: str) -> None:
        if name in self.running:
            self._run_safely(name, self.running[name].disarm)
        self.armed.discard(name)  # last: what an interrupt leaves is disarmed before the next step

    def _run_safely(self, name: str, call: Any) -> Any:
        """Return the result of a call into an analyzer; None after a fault, which is counted."""
        try:
            return call()
        except Exception as fault:
            pass_on(fault)
            self._count_fault(name, fault)
            return None

    def _count_fault(self, name: str, fault: Exception) -> None:
        """Log the first fault of an analyzer, and remove it after the third."""
        self._faults[name] = self._faults.get(name, 0) + 1
        if self._faults[name] == 1:
            _logger.warning("analyzer %s failed; training goes on", name, exc_info=fault)
        if self._faults[name] >= _PATIENCE:
            if name in self.running:
                reason = redact(" ".join(f"{type(fault).__name__}: {fault}".split()))[:_LONGEST]
                self.chosen += [f"analyzer {name} failed {_PATIENCE} times and is left out from now on: {reason}"]
                if (add := self.caveat_taker()) is not None:
                    add(self.chosen[-1:])
            try:
                self.running[name].disarm()
            except Exception as another:  # also of a hook in another thread that has removed it
                pass_on(another)
            self.running.pop(name, None)


_AFTER: Final = 2
_MOST_RANKS: Final = 2**16
_TYPES: Final = tuple(IssueType)
_SEVERITIES: Final = tuple(IssueSeverity)
NUM_VERDICTS: Final = len(_TYPES)


def exchanges_verdicts(step: int) -> bool:
    """Say whether ranks exchange verdicts: two steps after each rare analysis, when they send little else."""
    return step > _AFTER and rarely(step - _AFTER)


def pack(issues: Iterable[Issue]) -> list[float]:
    """Return a number for each type of issue; its sum tells how many ranks have the issue, and how severe it is."""
    worst: dict[IssueType, int] = {}
    for issue in issues:
        worst[issue.issue_type] = max(worst.get(issue.issue_type, 0), _SEVERITIES.index(issue.severity))
    return [float(1 + _MOST_RANKS * worst[kind]) if kind in worst else 0.0 for kind in _TYPES]


def unpack(sums: Sequence[float], num_ranks: int, step: int) -> list[Issue]:
    """Return the issues that more than half of the ranks have, each as severe as it is on average."""
    found = []
    for kind, number in zip(_TYPES, sums, strict=True):
        severities, count = divmod(round(number), _MOST_RANKS)
        if 2 * count > num_ranks:
            issue = Issue.found(
                kind,
                "",
                ("ranks that find it", count, num_ranks / 2),
                f"Found on {count} of {num_ranks} ranks, in the parts of the model that they hold.",
                "Call manager.diagnose() on a rank: it names the layers and tells what to do.",
                severity=_SEVERITIES[round(severities / count)],
                step=step,
            )
            found.append(issue)
    return found


def _usable(report: Report | None) -> Report | None:
    """Return a report after computing its metrics, so that a fault in them counts as one of its analyzer."""
    if report is not None:
        report.metrics()
    return report


def build_analyzers(specs: Any) -> dict[str, Analyzer]:
    """Make the analyzers that a configuration names."""
    built: dict[str, Analyzer] = {}
    for spec in [] if isinstance(specs, str) else specs:
        named = registry.split_spec(spec, "analyzer")
        if named is None:
            name, analyzer = registry.analyzers.name_of(spec), spec
        else:
            name, analyzer = named[0], _construct(*named)
        if not isinstance(analyzer, Analyzer):
            is_class = inspect.isclass(spec) and issubclass(spec, Analyzer)
            derive = "Derive its class from gradtrack.Analyzer."
            remedy = f"Pass an instance: {spec.__name__}()." if is_class else derive
            raise InputTypeError(f"analyzer {spec!r}: expected an Analyzer. {remedy}")
        if name in built:
            raise UsageError(f"analyzer {name!r} is named twice: expected each once. Remove one of them.")
        built[name] = analyzer
    return built


def _construct(name: str, options: dict[str, Any]) -> Analyzer:
    """Make an analyzer with its options; `every`, unless its class has such an option itself, sets when it looks."""
    parameters = inspect.signature(registry.analyzers.load(name)).parameters
    every = None if _EVERY in parameters else options.pop(_EVERY, None)
    if every is not None and (type(every) is not int or every < 1):
        raise UsageError(f"analyzer {name!r}: every = {every!r}: expected a number of steps. Write every: 10.")
    try:
        analyzer: Analyzer = registry.analyzers.load_for(name, options)(**options)
    except InputTypeError:
        raise
    except TypeError as fault:
        raise UsageError(f"analyzer {name!r}: {fault}. Check the values of its options.") from fault
    analyzer.looks_every = every
    return analyzer
