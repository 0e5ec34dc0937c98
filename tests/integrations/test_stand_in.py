"""A function in the place of a method, and back."""

from gradtrack.integrations.stand_in import stand_in


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
