"""Compiled loops over layer outputs and their gradients: one pass each, where numpy and torch take several.

They are loaded with the first look where the native engine is at work; elsewhere numpy and torch do the same. All that
is compiled here is in this file, since the compiler's cache on disk asks only whether this file has changed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradtrack.gradients.native.compiling import Value, compiled, compiled_for_numbers, compiled_freely, compiled_now

_LARGEST: Final = np.float32(np.finfo(np.float32).max)
_BLOCK: Final = 1024
_LANES: Final = 64
_FEW: Final = 65_536
_LOWEST_SUM, _HIGHEST_SUM = 1e-24, 1e36
"""Between them the squares that matter to a sum are ordinary float32 numbers."""


@compiled
def _count(run: Value, first: Value, second: Value, counts: Value) -> Value:
    """Count the elements that are beyond two limits and those that are not finite; return whether there are any."""
    beyond_first = beyond_second = broken = np.int32(0)
    for i in range(run.size):
        size = abs(run[i])
        beyond_first = np.int32(beyond_first + np.int32(size > first))  # a plain += would widen it
        beyond_second = np.int32(beyond_second + np.int32(size > second))
        broken = np.int32(broken + np.int32(not size <= _LARGEST))
    counts[0] += beyond_first
    counts[1] += beyond_second
    return broken > 0


@compiled_for_numbers
def _widen(row: Value, low: Value, high: Value) -> Value:
    for i in range(row.size):
        low[i] = min(low[i], row[i])
        high[i] = max(high[i], row[i])


@compiled_for_numbers
def _ends(run: Value, low: Value, high: Value, lows: Value, highs: Value) -> Value:
    """Return the least and the largest of a run and two numbers; one loop for both would not run on vectors."""
    if run.size < 4 * lows.size:
        for i in range(run.size):
            low, high = min(low, run[i]), max(high, run[i])
        return low, high
    lows[:] = low
    highs[:] = high
    for begin in range(0, run.size, lows.size):
        part = run[begin : begin + lows.size]
        _widen(part, lows, highs)
    for i in range(lows.size):
        low, high = min(low, lows[i]), max(high, highs[i])
    return low, high


@compiled_now("boolean(f4[:, :, ::1], f4[::1], f4[::1], f4, f4, i8[::1])")
def survey(
    values: NDArray[np.float32],
    low: NDArray[np.float32],
    high: NDArray[np.float32],
    first: float,
    second: float,
    counts: NDArray[np.int64],
) -> bool:
    """Widen the range of every unit by what it puts out, and add to the counts how many are beyond two limits.

    The units are the second dimension. Return whether all are finite; where one is not, the rest is left out.
    """
    num_rows, num_units, num_places = values.shape
    if num_places == 1:
        rows = values.reshape(num_rows, num_units)
        for row in range(num_rows):
            if _count(rows[row], first, second, counts):
                return False
            _widen(rows[row], low, high)
        return True
    lows, highs = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    for row in range(num_rows):
        for unit in range(num_units):
            if _count(values[row, unit], first, second, counts):
                return False
            low[unit], high[unit] = _ends(values[row, unit], low[unit], high[unit], lows, highs)
    return True


@compiled_freely
def _add(run: Value) -> Value:
    total = np.float32(0)
    for i in range(run.size):
        total += run[i] * run[i]
    return total


@compiled_freely
def _add_carefully(run: Value) -> Value:
    total = 0.0
    for i in range(run.size):
        value = np.float64(run[i])
        total += value * value
    return total


@compiled_now("void(f4[:, ::1], f8[::1])")
def add_squares(rows: NDArray[np.float32], found: NDArray[np.float64]) -> None:
    """Write the sum of squares of each row, whatever its magnitude: to six digits, of few elements to all of them."""
    few = rows.size <= _FEW
    for row in range(rows.shape[0]):
        total = 0.0
        for begin in range(0, rows.shape[1], _BLOCK):
            run = rows[row, begin : begin + _BLOCK]
            part = 0.0 if few else np.float64(_add(run))
            total += part if _LOWEST_SUM < part < _HIGHEST_SUM else _add_carefully(run)
        found[row] = total
