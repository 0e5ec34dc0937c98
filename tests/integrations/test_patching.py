"""A function in the place of a method, and back."""

from collections.abc import Iterator
from contextlib import contextmanager

from gradtrack.integrations.patching import embrace, stand_in


class Greeter:
    """Something with a method."""

    def greet(self) -> str:
        """Greet."""
        return "hello"


def test_the_method_comes_back() -> None:
    """While the function stands in it is called; afterwards nothing is left on the object."""
    greeter = Greeter()
    undo = stand_in(greeter, "greet", lambda: "hi")
    assert greeter.greet() == "hi"
    undo()
    assert greeter.greet() == "hello"
    assert vars(greeter) == {}
    undo()


def test_what_somebody_else_has_put_there_stays() -> None:
    """A stand-in from before comes back, and one from after is not taken away."""
    greeter = Greeter()
    first, second = (lambda: "first"), (lambda: "second")
    undo_first = stand_in(greeter, "greet", first)
    undo_second = stand_in(greeter, "greet", second)
    undo_first()
    assert greeter.greet() == "second"
    undo_second()
    assert greeter.greet() == "first"


def test_a_method_runs_within_a_context() -> None:
    """The context surrounds each call; afterwards nothing is left on the object."""
    greeter, seen = Greeter(), list[str]()

    @contextmanager
    def context() -> Iterator[None]:
        seen.append("in")
        yield
        seen.append("out")

    undo = embrace(greeter, "greet", context)
    assert greeter.greet() == "hello"
    assert seen == ["in", "out"]
    undo()
    assert vars(greeter) == {}
