"""A function in the place of a method, and back."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gradtrack.integrations.patching import embrace, stand_in
from gradtrack.support.interrupts import Changes


class Greeter:
    """Something with a method."""

    def greet(self) -> str:
        """Greet."""
        return "hello"


def test_the_method_comes_back() -> None:
    """While the function stands in it is called; afterwards nothing is left on the object."""
    greeter, changes = Greeter(), Changes()
    stand_in(changes, greeter, "greet", lambda: "hi")
    assert greeter.greet() == "hi"
    for _ in range(2):
        changes.undo()
        assert greeter.greet() == "hello"
        assert vars(greeter) == {}


class StruckGreeter(Greeter):
    """One that an interrupt strikes as soon as its method is replaced."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        raise KeyboardInterrupt


def test_an_interrupt_in_the_middle_leaves_nothing() -> None:
    """What undoes a change is known before the change is made."""
    greeter, changes = StruckGreeter(), Changes()
    with pytest.raises(KeyboardInterrupt):
        stand_in(changes, greeter, "greet", lambda: "hi")
    assert greeter.greet() == "hi"
    changes.undo()
    assert vars(greeter) == {}


def test_what_somebody_else_has_put_there_stays() -> None:
    """A stand-in from before comes back, and one from after is not taken away."""
    greeter, ours, theirs = Greeter(), Changes(), Changes()
    stand_in(ours, greeter, "greet", lambda: "first")
    stand_in(theirs, greeter, "greet", lambda: "second")
    ours.undo()
    assert greeter.greet() == "second"
    theirs.undo()
    assert greeter.greet() == "first"


def test_a_method_runs_within_a_context() -> None:
    """The context surrounds each call; afterwards nothing is left on the object."""
    greeter, changes, seen = Greeter(), Changes(), list[str]()

    @contextmanager
    def context() -> Iterator[None]:
        seen.append("in")
        yield
        seen.append("out")

    embrace(changes, greeter, "greet", context)
    assert greeter.greet() == "hello"
    assert seen == ["in", "out"]
    changes.undo()
    assert vars(greeter) == {}
