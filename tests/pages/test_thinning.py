"""Lines thinned out for a screen."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.pages.charts import thin_out

values = st.lists(st.floats(width=32), min_size=0, max_size=300)


@given(values, st.integers(1, 50))
def test_no_spike_is_lost(numbers: list[float], buckets: int) -> None:
    """The smallest and the largest finite value are kept, in no more buckets than asked for."""
    line = np.array(numbers, dtype=np.float64)
    found = thin_out(np.arange(len(line)), line, buckets=buckets)
    finite = line[np.isfinite(line)]
    assert len(found.steps) == len(found.median) == min(len(finite), buckets)
    if len(finite):
        assert (found.low.min(), found.high.max()) == (finite.min(), finite.max())
        assert (found.low <= found.median).all()
        assert (found.median <= found.high).all()
        assert (np.diff(found.steps) > 0).all()


@given(values)
def test_a_short_line_stays_as_it_is(numbers: list[float]) -> None:
    """A line with no more values than buckets keeps each of its finite values at its step."""
    line = np.array(numbers, dtype=np.float64)
    found = thin_out(np.arange(len(line)), line, buckets=300)
    assert found.low is found.high
    assert np.array_equal(found.steps, np.flatnonzero(np.isfinite(line)))
    assert np.array_equal(found.median, line[np.isfinite(line)])
