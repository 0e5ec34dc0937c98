"""The trend of a loss, as the rules of the gradient flow read it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradtrack.analyzers.flow.samples import Trend


@given(
    st.lists(st.integers(-1000, 1000), min_size=10, max_size=60),
    st.integers(-20, 20),
)
def test_trend_is_free_of_scale(losses: list[int], power: int) -> None:
    """A loss times a power of two falls and rises as the loss does."""
    plain = Trend([float(loss) for loss in losses[:16]], [float(loss) for loss in losses])
    scaled = Trend([loss * 2.0**power for loss in losses[:16]], [loss * 2.0**power for loss in losses])
    for name in ("falling", "rising", "learned", "risen", "turning"):
        assert getattr(plain, name) == getattr(scaled, name)
