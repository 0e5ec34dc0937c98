"""A function in the place of an object's own method, or around it, for as long as a training lasts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any


def stand_in(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Put a function in the place of a method of one object, and return what puts back what was there."""
    there = vars(owner).get(name)
    setattr(owner, name, function)

    def undo() -> None:
        if vars(owner).get(name) is not function:
            return  # somebody has come after us, and calls us
        if there is None:
            delattr(owner, name)
        else:
            setattr(owner, name, there)

    return undo


def embrace(owner: Any, name: str, context: Callable[[], AbstractContextManager[object]]) -> Callable[[], None]:
    """Run a method of one object within a context, and return what puts back what was there."""
    method = getattr(owner, name)

    @wraps(method)
    def embraced(*arguments: Any, **keywords: Any) -> Any:
        with context():
            return method(*arguments, **keywords)

    return stand_in(owner, name, embraced)
