"""Records passed to any function `log(metrics, step)`: Comet, ClearML, Aim, SwanLab, or one of the user's own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar, Final, final

from gradtrack.backends.base import Backend
from gradtrack.errors import ClosedError, UsageError
from gradtrack.records import Identity, Record
from gradtrack.support.redact import redact

Log = Callable[..., object]
_WAY: Final = "Pass a function log(metrics, step), or where it is imported from, as in log='my_module:log'."


@final
class CallableBackend(Backend):
    """A backend that calls `log(metrics, step)` for each row, with the metrics as a dictionary of floats.

    `log` is a function or the text `module:function`, by which a configuration file and a replay name it. The step is
    passed as `step=` where the function takes that name, else by position. It is called on a thread of its own and may
    block or raise: a row at which it raised comes again, and those before it in the same batch do not. What it has
    been given cannot be asked of it, so a replay goes by what was acknowledged.
    """

    code_options: ClassVar[frozenset[str]] = frozenset({"log"})

    def __init__(self, *, log: Log | str | None = None) -> None:
        self._name = log if isinstance(log, str) else None
        self._log = _with_step(_imported(log) if isinstance(log, str) else log, shown=log)
        self._passed: set[Identity] = set()
        self._closed = False

    def write(self, records: Sequence[Record]) -> None:
        if self._closed:
            raise ClosedError("callable backend: it is closed. Make a new one for another run.")
        for record in records:
            if record.identity not in self._passed:
                self._log(dict(record.metrics), record.step)
                self._passed.add(record.identity)
        self._passed.clear()

    def close(self, *, failed: bool = False) -> None:
        self._closed = True

    def address(self) -> Mapping[str, Any]:
        return {} if self._name is None else {"log": self._name}

    @classmethod
    def probe(cls, **options: Any) -> str:
        backend = cls(**options)
        return f"the function {backend._name or getattr(options['log'], '__qualname__', 'that was passed')}"


def _imported(name: str) -> object:
    """Return the function that a text names; importing its module runs the code in it."""
    module, colon, path = name.partition(":")
    try:
        if not (module and colon and path):
            raise ValueError("it has no module before a colon, or nothing behind it")
        return reduce(getattr, path.split("."), importlib.import_module(module))
    except Exception as fault:
        reason = redact(f"{type(fault).__name__}: {fault}")
        raise UsageError(f"callable: log {name!r}: expected what can be imported ({reason}). {_WAY}") from fault


def _with_step(log: object, *, shown: object) -> Callable[[dict[str, float], int], object]:
    """Return a function that passes the step by its name, or by position where it has another one."""
    if log is None:
        raise UsageError(f"callable: log: expected a function to call. {_WAY}")
    if not callable(log) or inspect.iscoroutinefunction(log):
        raise UsageError(f"callable: log {redact(repr(shown))}: expected a function that is not async. {_WAY}")
    try:
        signature = inspect.signature(log)
    except (TypeError, ValueError):  # a function of C tells none
        return lambda metrics, step: log(metrics, step)
    try:
        signature.bind({}, step=0)
        return lambda metrics, step: log(metrics, step=step)
    except TypeError:
        pass
    try:
        signature.bind({}, 0)
        return lambda metrics, step: log(metrics, step)
    except TypeError as fault:
        raise UsageError(f"callable: log takes {signature}: expected metrics and a step ({fault}). {_WAY}") from fault
