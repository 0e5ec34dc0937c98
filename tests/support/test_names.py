"""Names of files that are made from the names of pairs."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from gradtrack.support.names import file_part

NAMES = st.text(st.sampled_from("aA0_- ./:\\é\ud800"), max_size=100)


@given(NAMES, NAMES)
def test_every_name_is_a_part_of_its_own(first: str, second: str) -> None:
    """Whatever a pair is called, its part of a file's name is short, plain, and shared with no other pair."""
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,80}", file_part(first))
    assert (file_part(first) == file_part(second)) == (first == second)


def test_a_plain_name_stays_as_it_is() -> None:
    """A name that needs no change is found again at sight."""
    assert file_part("critic-2_b") == "critic-2_b"
