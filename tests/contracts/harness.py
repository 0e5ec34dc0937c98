"""What the contract suite needs to know of a backend under test."""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from pathlib import Path

from gradtrack.backends.base import Backend


class Harness(ABC):
    """One backend in a directory of its own: how to make it, and how to read back what its destination holds.

    `tests/contracts/harnesses/<backend>.py` holds exactly one subclass; the suite finds it by the file's name.
    """

    flush_is_durable: bool = True
    """Whether everything that was written can be read back after `flush`, without a close."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @abstractmethod
    def open(self) -> Backend:
        """Make the backend; a second call reaches the same destination again."""

    @abstractmethod
    def read(self) -> dict[str, list[tuple[int, float]]]:
        """Return (step, value) by the original metric name, in the order in which the destination holds them."""

    def kept(self, name: str, value: float) -> float | None:
        """Return what comes back for a value, or None where the destination has no place for this metric."""
        return value

    def release(self) -> None:
        """Stop what the harness started."""


def harness_of(name: str) -> type[Harness]:
    """Return the harness of a backend."""
    try:
        module = importlib.import_module(f"tests.contracts.harnesses.{name}")
    except ModuleNotFoundError as fault:
        if not str(fault.name).startswith("tests."):
            raise
        raise AssertionError(f"backend {name!r} has no harness: add tests/contracts/harnesses/{name}.py") from None
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Harness) and value.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{module.__name__} holds {len(found)} harnesses: expected one"
    return found[0]
