"""Curves as one line of characters."""

from __future__ import annotations

import math

import numpy as np

from gradtrack.pages.terminal.overview import sparkline


def test_sparkline_follows_its_values() -> None:
    """The lowest value has the lowest block and the highest the highest."""
    assert sparkline(np.array([0.0, 1.0, 2.0, 7.0])) == "▁▂▃█"
    assert sparkline(np.array([1.0, 10.0, 100.0]), log_scale=True) == "▁▅█"
    assert sparkline(np.array([math.nan, 3.0, math.nan, math.inf, 3.0])) == " ▁▁∞▁"
    assert sparkline(np.array([])) == ""
    assert len(sparkline(np.arange(10_000.0), width=20)) == 20


def test_no_spike_and_no_loss_of_a_number_is_left_out() -> None:
    """One step among ten thousand that is high or not a number is seen, at its place."""
    values = np.ones(10_000)
    values[2500], values[7500] = 9.0, math.nan
    assert sparkline(values, width=8, lost=np.isnan(values)) == "▁▁█▁▁▁×▁"
    values[5000:] = math.nan
    assert sparkline(values, width=8, lost=np.isnan(values)) == "▁▁█▁××××"
    assert sparkline(np.array([0.0, 1.0, 100.0]), log_scale=True) == "▁▁█"


def test_two_lines_share_a_scale() -> None:
    """With a scale the blocks of two lines can be compared."""
    low, high = np.array([1.0, 2.0]), np.array([7.0, 8.0])
    both = np.concatenate([low, high])
    assert sparkline(low, scale=both) == "▁▂"
    assert sparkline(high, scale=both) == "▇█"
