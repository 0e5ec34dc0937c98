"""Exceptions that strike a training at a chosen line of the package, as the handler of a signal raises them."""

from __future__ import annotations

import gc
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

import gradtrack

PACKAGE = str(Path(gradtrack.__file__).parent)
CANARY = 1234.5
_PADDING = 512


class Struck(Exception):
    """What the user's handler raises."""


class Point(NamedTuple):
    """The nth time that a line is reached."""

    file: str
    line: int
    nth: int


@contextmanager
def watching_lines(visit: Callable[[Point], object]) -> Iterator[None]:
    """Call `visit` before each line of the package that this thread reaches; what it raises passes from that line."""
    seen: Counter[tuple[str, int]] = Counter()

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        return at_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def at_line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            file, line = frame.f_code.co_filename, frame.f_lineno
            # A tracer can strike between the body of a `with` and its exit, and at `try`; no handler is called there.
            if not linecache.getline(file, line).lstrip().startswith(("with ", "try:")):
                seen[file, line] += 1
                visit(Point(file, line, seen[file, line]))
        return at_line

    gc.collect()  # else what an earlier training left is deleted here, and nothing can be raised out of `__del__`
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


class Strike:
    """Raises once, at one point."""

    def __init__(self, point: Point) -> None:
        self._point, self.struck = point, False

    def __call__(self, point: Point) -> None:
        """Raise if this is the point."""
        if point == self._point and not self.struck:
            self.struck = True
            raise Struck(f"{self._point.file}:{self._point.line} ({self._point.nth})")


def ends_of(points: list[Point]) -> list[Point]:
    """Return for each line the first and the last time that it was reached."""
    last = {(point.file, point.line): point for point in points}
    return [point for point in points if point.nth == 1 or point is last[point.file, point.line]]


NUMBERS_OF_POINTS: Final = (
    4,
    pytest.param(40, marks=pytest.mark.slow),
    pytest.param(sys.maxsize, marks=pytest.mark.exhaustive, id="all"),
)
"""At how many points an exception strikes: in each run of the tests, in the slow ones, and in the exhaustive ones."""


def spread(points: Sequence[Point], number: int) -> Sequence[Point]:
    """Return at most this number of points, from the first to the last."""
    return points[:: -(-len(points) // number)]


class GuardedMemory(ModuleType):
    """numpy whose arrays of float64 lie between canaries, for a module that gives them to compiled code."""

    def __init__(self) -> None:
        super().__init__("numpy")
        self._whole: list[tuple[np.ndarray[Any, Any], int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, shape: Any, dtype: Any = np.float64) -> Any:
        """Return an array that lies within a larger one."""
        if dtype is not np.float64:
            return np.empty(shape, dtype)
        size = int(np.prod(shape))
        whole = np.full(size + 2 * _PADDING, CANARY)
        self._whole.append((whole, size))
        return whole[_PADDING : _PADDING + size].reshape(shape)

    def is_whole(self) -> bool:
        """Say whether nothing beside the arrays was written to."""
        return bool(self._whole) and all(
            (whole[:_PADDING] == CANARY).all() and (whole[_PADDING + size :] == CANARY).all()
            for whole, size in self._whole
        )
