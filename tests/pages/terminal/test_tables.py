"""The numbers and names that tables show."""

from __future__ import annotations

import math

import pytest

from gradtrack.pages.terminal.tables import number


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.0, "0"),
        (11236.0, "11236"),
        (999_999, "999999"),
        (12345.678, "12346"),
        (1234.5678, "1235"),
        (0.000123456, "0.0001235"),
        (1.5e6, "1.5e+06"),
        (1e-12, "1e-12"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_short_and_counts_are_whole(value: float | None, shown: str) -> None:
    """Four digits are enough for a measurement, a count of elements has all of its own below a million."""
    assert number(value) == shown
