"""Kernels are compiled without a cache where none can be used; what strikes meanwhile is no such thing."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import pytest

from gradtrack.gradients.native import kernels


def double(value: int) -> int:
    """Return twice a number."""
    return 2 * value


def test_a_cache_that_cannot_be_used_is_left_out() -> None:
    """The second attempt is made without it."""
    asked = []

    def compiler(signature: Any, **options: Any) -> Any:
        asked.append(options)
        if options.get("cache"):
            raise OSError("read-only")
        return lambda function: function

    assert kernels._cached(compiler, double, None, nogil=True)(2) == 4
    assert asked == [{"cache": True, "nogil": True}, {"nogil": True}]


def test_what_a_signal_raises_meanwhile_reaches_the_training() -> None:
    """A timeout of the user's is not taken for a damaged cache."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    def compiler(signature: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)
        raise AssertionError("it was struck")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(TimeoutError):
            kernels._cached(compiler, double, None)
    finally:
        signal.signal(signal.SIGALRM, before)
