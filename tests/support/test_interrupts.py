"""What a handler of the user's raises when a signal comes reaches the training, whatever of ours it strikes."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pydantic
import pytest
import torch

from gradtrack import GradientManager
from gradtrack.analyzers.base import Analyzer, Schedule, always
from gradtrack.analyzers.tools.hooks import Faults
from gradtrack.backends.base import Backend
from gradtrack.delivery.journal import writing as journal_module
from gradtrack.delivery.journal.reading import find_journals
from gradtrack.delivery.journal.writing import Journal
from gradtrack.health.rule_engine import RULES
from gradtrack.records import Record
from gradtrack.reports import Report
from gradtrack.support.interrupts import Changes, pass_on, start
from tests.delivery.doubles import RUN, row
from tests.training import train


class TerminatedError(Exception):
    """What a training raises when it is told to end: no KeyboardInterrupt, and no SystemExit."""


def usual(number: int, frame: FrameType | None) -> None:
    """End the training."""
    raise TerminatedError


def once(number: int, frame: FrameType | None) -> None:
    """End the training, and leave the next signal to the system."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    _raise()


def loose(*_: object) -> None:
    """End the training, whatever one is told."""
    raise TerminatedError


def late(number: int, frame: FrameType | None) -> None:
    """Say that the time is over, as many do with an alarm."""
    raise TimeoutError


class Handler:
    """A handler that is a method."""

    def handle(self, number: int, frame: FrameType | None) -> None:
        """End the training."""
        raise TerminatedError


def _raise() -> None:
    raise TerminatedError


HANDLERS: dict[str, Callable[..., Any]] = {
    "function": usual,
    "resets itself": once,
    "any arguments": loose,
    "TimeoutError": late,
    "method": Handler().handle,
    "lambda": lambda number, frame: _raise(),
    "partial": functools.partial(lambda text, number, frame: _raise(), "text"),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, usual)
    yield
    signal.signal(signal.SIGUSR1, before)


def strike(*_: object, **__: object) -> Any:
    """Be struck by the signal here."""
    signal.raise_signal(signal.SIGUSR1)


class Struck(Backend):
    """A backend on the training thread that a signal strikes."""

    inline = True
    name = "struck"

    def write(self, records: Sequence[Record]) -> None:
        """Be struck."""
        strike()


class StruckAnalyzer(Analyzer):
    """An analyzer that a signal strikes."""

    name = "struck"
    schedule: ClassVar[Schedule] = staticmethod(always)

    def inspect(self, snapshot: Any) -> Report | None:
        """Be struck."""
        strike()
        return None


@pytest.mark.parametrize("name", HANDLERS)
def test_handler_is_told_from_a_fault(name: str) -> None:
    """Whatever the handler is, what it raised is passed on, and what the line itself raised is not."""
    signal.signal(signal.SIGUSR1, HANDLERS[name])
    with pytest.raises((TerminatedError, TimeoutError)):
        contained(strike)
    assert isinstance(contained(lambda: torch.zeros(2) @ torch.zeros(3)), RuntimeError)


def test_fault_of_what_looks_at_its_caller_is_contained() -> None:
    """A tracker that looks at who is calling it, as those that warn or log do, is no handler of signals."""

    def looks_at_its_caller() -> None:
        caller = sys._getframe(1)
        raise ValueError(caller.f_code.co_name)

    assert isinstance(contained(lambda: looks_at_its_caller()), ValueError)


def _turn_it() -> None:
    """Raise another exception, as libraries do with what their callbacks raise."""
    try:
        strike()
    except TerminatedError as fault:
        raise ValueError("a callback failed") from fault


class StruckModel(pydantic.BaseModel):
    """A model whose serializer a signal strikes."""

    value: int = 0

    @pydantic.field_serializer("value")
    def serialize(self, value: int) -> int:
        """Be struck."""
        strike()
        return value


@pytest.mark.parametrize("call", [_turn_it, lambda: StruckModel().model_dump(mode="json")], ids=["python", "compiled"])
def test_what_a_library_has_turned_is_passed_on(call: Callable[[], object]) -> None:
    """A library that raises an exception of its own in the place of the handler's does not hide that one."""
    with pytest.raises(TerminatedError):
        contained(call)


def test_interrupt_that_a_library_has_turned_is_passed_on() -> None:
    """An interrupt from the keyboard is none of a tracker's faults, whatever a library makes of it."""
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        contained(lambda: StruckModel().model_dump(mode="json"))


def test_fault_while_a_caller_handles_an_interrupt_is_contained() -> None:
    """A program that closes the manager as it handles the interrupt has that one behind it."""
    try:
        strike()
    except TerminatedError:
        assert isinstance(contained(lambda: 1 / 0), ZeroDivisionError)


def test_thread_that_is_struck_as_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler's exception comes out of the start, and no KeyError of threading's own tables."""
    begin, done = threading._start_new_thread, threading.Event()  # type: ignore[attr-defined]

    def struck(*arguments: Any) -> None:
        begin(*arguments)
        assert done.wait(10.0)
        strike()

    monkeypatch.setattr(threading, "_start_new_thread", struck)
    with pytest.raises(TerminatedError):
        start(threading.Thread(target=done.set))


MODEL = torch.nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
REGISTERS: dict[str, tuple[Callable[..., Any], dict[str, bool]]] = {
    "forward": (MODEL.register_forward_hook, {"with_kwargs": True, "always_call": True}),
    "before forward": (MODEL.register_forward_pre_hook, {"with_kwargs": True}),
    "gradient": (MODEL.weight.register_hook, {}),
    "accumulated": (MODEL.weight.register_post_accumulate_grad_hook, {}),
    "every module": (torch.nn.modules.module.register_module_forward_hook, {"always_call": True}),
    "step": (OPTIMIZER.register_step_pre_hook, {}),
}


def tables() -> list[Any]:
    """Return what is registered where those functions register."""
    owners: list[Any] = [MODEL, MODEL.weight, torch.nn.modules.module, OPTIMIZER]
    found = [getattr(one, name) for one in owners for name in dir(one) if "_hooks" in name]
    return [dict(one) for one in found if isinstance(one, dict)]


@pytest.mark.parametrize("kind", REGISTERS)
@pytest.mark.parametrize("struck", [True, False])
def test_hook_is_removed_without_its_handle(kind: str, struck: bool) -> None:
    """An exception that strikes within torch, once the hook is there, leaves neither the hook nor its options."""
    register, options = REGISTERS[kind]
    kept = register(lambda *_: None, **options)
    before = tables()

    def registering(hook: Any, **given: Any) -> Any:
        handle = register(hook, **given)
        if struck:
            raise TerminatedError
        return handle

    registering.__self__ = getattr(register, "__self__", torch.nn.modules.module)  # type: ignore[attr-defined]
    changes = Changes()
    with contextlib.suppress(TerminatedError):
        changes.hook(registering, lambda *_: None, **options)
    assert tables() != before
    for _ in range(2):
        changes.undo()
        assert tables() == before
    kept.remove()


@pytest.mark.parametrize("struck", range(3))
def test_changes_are_undone_though_an_interrupt_strikes_one(struck: int) -> None:
    """The last change first, and all of them; the interrupt comes out."""
    state, strikes, changes = {0: "new", 1: "new", 2: "new"}, [struck], Changes()

    def undo(key: int) -> None:
        if strikes == [key]:
            strikes.clear()
            raise TerminatedError
        state[key] = "old"

    for key in state:
        changes.note(functools.partial(undo, key))
    with pytest.raises(TerminatedError), changes:
        pass
    assert set(state.values()) == {"old"}


def contained(call: Callable[[], Any]) -> Exception | None:
    """Contain the fault of a call, as a guard of ours does."""
    try:
        call()
    except Exception as fault:
        pass_on(fault)
        return fault
    return None


@pytest.mark.parametrize("where", ["backend", "analyzer", "rule", "journal"])
def test_training_ends_wherever_the_signal_strikes(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that is struck raises what the handler raised; no `except` block takes it for a fault of its own."""
    backends: list[Any] = [Struck()] if where == "backend" else ["json"]
    manager = GradientManager(
        backends=backends,
        analyzers=[StruckAnalyzer()] if where == "analyzer" else [],
        run_dir=tmp_path,
        grad_log_every_n_steps=1,
    )
    if where == "rule":
        rule = next(iter(RULES.values()))
        monkeypatch.setattr(rule, "judge", strike)
    if where == "journal":
        monkeypatch.setattr(journal_module, "encode_row", strike)
    with pytest.raises(TerminatedError):
        train(manager, 1)
    monkeypatch.undo()
    manager.close()
    assert "failed" not in caplog.text
    assert "misses rows" not in caplog.text


def test_hooks_pass_it_on() -> None:
    """A hook of ours in the user's forward pass lets it through."""
    faults = Faults()
    with pytest.raises(TerminatedError):
        faults.guarded(strike)()
    faults.check()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_timeout_in_the_middle_of_a_write_leaves_whole_rows(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TimeoutError is an OSError like that of a full disk: a row that was written stays, and none is cut."""
    signal.signal(signal.SIGUSR1, late)
    journal = Journal(tmp_path, RUN)
    assert journal.append(0, row(0))
    write = journal_module._write_whole

    def struck(*arguments: Any) -> None:
        if moment == "after":
            write(*arguments)
        strike()

    monkeypatch.setattr(journal_module, "_write_whole", struck)
    with pytest.raises(TimeoutError):
        journal.append(1, row(1))
    monkeypatch.setattr(journal_module, "_write_whole", write)
    assert journal.append(2, row(2))
    journal.close(10.0)
    (found,) = find_journals(tmp_path)
    assert [record.step for _, record in found.rows()] == ([0, 1, 2] if moment == "after" else [0, 2])
    assert found.damaged == []
    written = found.parts[0].read_bytes()
    assert written.endswith(b"\n")
    assert len(written.splitlines()) == 1 + (3 if moment == "after" else 2)
