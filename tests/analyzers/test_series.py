"""The losses and norms of a run, added one by one or several together."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.analyzers.base import Series

STEP = st.tuples(st.floats(-20, 20), st.one_of(st.none(), st.floats(0.01, 10)))


@given(
    st.lists(st.lists(STEP, min_size=1, max_size=16), min_size=6, max_size=30),
    st.booleans(),
    st.sampled_from(((), ("head.bias",))),
)
def test_steps_together_are_remembered_as_one_by_one(
    parts: list[list[tuple[float, float | None]]], has_losses: bool, missing: tuple[str, ...]
) -> None:
    """Whatever is full already, and whether a level is due among them."""
    together, single = Series(), Series()
    for part in parts:
        log_norms = [log_norm for log_norm, _ in part]
        losses = [1.0 if has_losses and loss is None else loss for _, loss in part]
        together.extend(log_norms, losses, missing)
        for log_norm, loss in zip(log_norms, losses, strict=True):
            single.append(log_norm, loss, missing, finite=True)
    assert together.state_dict() == single.state_dict()


@pytest.mark.parametrize("size", [1, 3, 15, 16])
def test_every_level_is_kept(size: int) -> None:
    """Of a long run, in parts of the sizes that a fast path has."""
    together, single = Series(), Series()
    for start in range(0, 960, size):
        losses = [1.0 + math.sin(step) for step in range(start, start + size)]
        together.extend(losses, losses, ())
        for loss in losses:
            single.append(loss, loss, (), finite=True)
    assert len(together.levels) > 16
    assert together.state_dict() == single.state_dict()
