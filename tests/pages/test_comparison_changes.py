"""How numbers of two runs stand to each other."""

from __future__ import annotations

import math

from gradtrack.pages.comparison import Row, in_words, most_changed, with_ratios

ROWS: list[Row] = [("same", 1.0, 1.0), ("twice", 1.0, 2.0), ("tenth", 1.0, 0.1), ("lost", 1.0, math.nan)]


def test_numbers_are_written_for_a_person() -> None:
    """Counts have their thousands apart, shares are per cent, and what is not known is a dash."""
    rows: list[Row] = [("steps", 12000, None), ("clip rate, median", 0.5, 1.0), ("last loss", 0.123456, math.nan)]
    assert in_words(rows) == [
        ("steps", "12,000", "–"),
        ("clip rate, median", "50.0%", "100.0%"),
        ("last loss", "0.1235", "nan"),
    ]


def test_a_ratio_needs_two_numbers() -> None:
    """Where one is missing, no number or zero, there is no ratio."""
    rows: list[Row] = [*ROWS, ("new", None, 1.0), ("gone", 1.0, None), ("zero", 0.0, 1.0)]
    assert [words[-1] for words in with_ratios(rows)] == ["1", "2", "0.1", "–", "–", "–", "–"]


def test_what_changed_most_keeps_its_order() -> None:
    """A number that is lost changed more than any, and growing counts like shrinking."""
    assert [name for name, *_ in most_changed(ROWS, 2)] == ["tenth", "lost"]
    assert [name for name, *_ in most_changed(ROWS, 3)] == ["twice", "tenth", "lost"]


def test_what_only_one_run_has_makes_room_for_what_changed() -> None:
    """Two architectures share few names: those come first, and what is equal comes last."""
    rows: list[Row] = [("new", None, 1.0), ("gone", 1.0, None), *ROWS]
    assert [name for name, *_ in most_changed(rows, 3)] == ["twice", "tenth", "lost"]
    assert "same" not in [name for name, *_ in most_changed(rows, len(rows) - 1)]
