"""Names of files that are made from the names of pairs, and numbers in few digits."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.support.names import file_part, number

NAMES = st.text(st.sampled_from("aA0_- ./:\\é\ud800"), max_size=100)


@given(NAMES, NAMES)
def test_every_name_is_a_part_of_its_own(first: str, second: str) -> None:
    """Whatever a pair is called, its part of a file's name is short, plain, and shared with no other pair."""
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,80}", file_part(first))
    assert (file_part(first) == file_part(second)) == (first == second)


def test_a_plain_name_stays_as_it_is() -> None:
    """A name that needs no change is found again at sight."""
    assert file_part("critic-2_b") == "critic-2_b"


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
