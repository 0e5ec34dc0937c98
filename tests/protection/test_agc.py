"""Unit-wise clipping costs as much for each tensor, however many there are."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from gradtrack import GradientClipper, GradientConfig
from tests.training import with_gradients


def lines_run(num_tensors: int) -> int:
    """Return how many lines of Python clipping runs, for tensors of which none is limited."""
    model = with_gradients([torch.full((2, 2), 1e-9) for _ in range(num_tensors)])
    clipper = GradientClipper(GradientConfig(clip_type="agc"))
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        clipper.clip_gradients(model)
    finally:
        sys.settrace(before)
    return count


def test_the_work_grows_with_the_number_of_tensors() -> None:
    """Four times as many tensors take about four times as many lines, and not sixteen times."""
    assert lines_run(400) < 5 * lines_run(100)
