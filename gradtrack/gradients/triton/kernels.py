"""The kernels of the Triton engine: one launch measures, merges or changes every gradient of a device.

Gradients are read through a table of addresses, each as a line of its elements in the order of their memory. A program
reads one chunk of one gradient and leaves a partial row in float64; the rows are merged in the order of their chunks,
so that the same gradients have the same sums, to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOAT32: tl.constexpr = tl.constexpr(0)
FLOAT64: tl.constexpr = tl.constexpr(1)
BFLOAT16: tl.constexpr = tl.constexpr(2)
FLOAT16: tl.constexpr = tl.constexpr(3)
"""The codes of the types; a set of types is the sum of 1 << code."""

TILE: tl.constexpr = tl.constexpr(1024)
"""The number of elements that a program reads at once."""
COLUMNS: tl.constexpr = tl.constexpr(8)
"""Sum, squares, minimum, maximum, zeros, NaN, +Inf, -Inf, as in `gradtrack.gradients.moments`."""
WIDE_COLUMNS: tl.constexpr = tl.constexpr(11)
"""Of float64 gradients also the sum of the deviations from the first element, of their squares, and that element."""


@triton.jit
def _add(x, here, pivot, first, second, total, squares, shifted, spread, low, high, counts, FACTORS: tl.constexpr):
    """Add a tile to the accumulators; of a lane that is not `here`, nothing."""
    infinity = float("inf")
    finite = here & (tl.abs(x) < infinity)
    value = tl.where(finite, x, 0.0)
    wide = value.to(tl.float64)
    if FACTORS:
        wide = wide * first * second
    total += wide
    squares += wide * wide
    if x.dtype == tl.float64:
        apart = tl.where(finite, wide - pivot, 0.0)
        shifted += apart
        spread += apart * apart
    low = tl.minimum(low, tl.where(finite, value, infinity))
    high = tl.maximum(high, tl.where(finite, value, -infinity))
    # A lane sees at most 64 tiles, so that one byte of an integer holds each of its counts.
    kind = tl.where(x != x, 1 << 8, tl.where(x > 0, 1 << 16, 1 << 24))
    kind = tl.where(finite, tl.where(value == 0, 1, 0), tl.where(here, kind, 0))
    return total, squares, shifted, spread, low, high, counts + kind


@triton.jit
def load_tile(pointer, lanes, mask, TYPE: tl.constexpr):
    """Load a tile as float32, or as float64 where it is; a mask of None loads all of it."""
    x = tl.load(pointer + lanes) if mask is None else tl.load(pointer + lanes, mask=mask, other=0)
    if TYPE == tl.bfloat16:  # the upper half of a float32, which keeps denormal numbers
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif TYPE == tl.float16:
        x = x.to(tl.float32)
    return x


@triton.jit
def _sums(address, start, left, pivot, first, second, CODE: tl.constexpr, CHUNK: tl.constexpr, FACTORS: tl.constexpr):
    """Return the sums over a chunk, lane by lane but for the extremes; `left` are left from `start` on.

    A lane has the same elements whether they are aligned or not, so that sums do not depend on where a gradient is.
    """
    TYPE: tl.constexpr = (
        tl.float32 if CODE == 0 else tl.float64 if CODE == 1 else tl.bfloat16 if CODE == 2 else tl.float16
    )
    wide: tl.constexpr = tl.float64 if TYPE == tl.float64 else tl.float32
    lanes = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float64)
    squares = tl.zeros([TILE], tl.float64)
    shifted = tl.zeros([TILE], tl.float64)
    spread = tl.zeros([TILE], tl.float64)
    low = tl.full([TILE], float("inf"), wide)
    high = tl.full([TILE], -float("inf"), wide)
    counts = tl.zeros([TILE], tl.int32)
    stored: tl.constexpr = tl.int16 if TYPE == tl.bfloat16 else TYPE
    address += start * (4 if CODE == 0 else 8 if CODE == 1 else 2)
    pointer = address.to(tl.pointer_type(stored))
    if (left >= CHUNK) & (address % 16 == 0):
        aligned = tl.multiple_of(pointer, 16)
        for place in range(0, CHUNK, TILE):
            x = load_tile(aligned + place, lanes, None, TYPE)
            total, squares, shifted, spread, low, high, counts = _add(
                x, True, pivot, first, second, total, squares, shifted, spread, low, high, counts, FACTORS
            )
    else:
        for place in range(0, tl.minimum(left, CHUNK).to(tl.int32), TILE):
            here = place + lanes < left
            x = load_tile(pointer + place, lanes, here, TYPE)
            total, squares, shifted, spread, low, high, counts = _add(
                x, here, pivot, first, second, total, squares, shifted, spread, low, high, counts, FACTORS
            )
    return total, squares, shifted, spread, tl.min(low).to(tl.float64), tl.max(high).to(tl.float64), counts


@triton.jit
def _first_element(address, first, second, FACTORS: tl.constexpr):
    """Return the first element of a float64 gradient, 0 if it is not finite."""
    x = tl.load(address.to(tl.pointer_type(tl.float64)))
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    if FACTORS:
        x = x * first * second
    return x


@triton.jit
def number_at(inputs, index):
    """Return a float64 that the host has put among the addresses."""
    return tl.load((inputs + index).to(tl.pointer_type(tl.float64)))


@triton.jit
def measure(
    inputs,
    sizes,
    codes,
    firsts,
    tensor_of,
    partial,
    num_tensors,
    num_chunks,
    TYPES: tl.constexpr,
    CHUNK: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Measure one chunk, and write its row of sums into its column of `partial`.

    `inputs` has the addresses and, after them, two factors that the elements are multiplied by.
    """
    chunk = tl.program_id(0)
    index = tl.load(tensor_of + chunk)
    start = (chunk - tl.load(firsts + index)).to(tl.int64) * CHUNK
    left = tl.load(sizes + index) - start
    code = tl.load(codes + index)
    address = tl.load(inputs + index)
    first = number_at(inputs, num_tensors)
    second = number_at(inputs, num_tensors + 1)
    pivot = tl.full([], 0.0, tl.float64)
    total = tl.zeros([TILE], tl.float64)
    squares = tl.zeros([TILE], tl.float64)
    shifted = tl.zeros([TILE], tl.float64)
    spread = tl.zeros([TILE], tl.float64)
    low = tl.full([], float("inf"), tl.float64)
    high = tl.full([], -float("inf"), tl.float64)
    counts = tl.zeros([TILE], tl.int32)
    for kind in tl.static_range(4):
        if (TYPES >> kind) & 1:
            if code == kind:
                if kind == 1:
                    pivot = _first_element(address, first, second, FACTORS)
                total, squares, shifted, spread, low, high, counts = _sums(
                    address, start, left, pivot, first, second, kind, CHUNK, FACTORS
                )
    if FACTORS:
        low = low * first * second
        high = high * first * second
    place = partial + chunk
    tl.store(place, tl.sum(total))
    tl.store(place + num_chunks, tl.sum(squares))
    tl.store(place + 2 * num_chunks, low)
    tl.store(place + 3 * num_chunks, high)
    for column in tl.static_range(4):
        tl.store(place + (4 + column) * num_chunks, tl.sum((counts >> (8 * column)) & 255).to(tl.float64))
    if TYPES & 2:
        tl.store(place + 8 * num_chunks, tl.sum(shifted))
        tl.store(place + 9 * num_chunks, tl.sum(spread))


@triton.jit
def merge_column(source, row_stride, column_stride, begin, end, COLUMN: tl.constexpr, WIDTH: tl.constexpr):
    """Return one column of some rows merged: the least, the greatest, or the sum; WIDTH rows are read at once."""
    rows = tl.arange(0, WIDTH)
    empty = float("inf") if COLUMN == 2 else -float("inf") if COLUMN == 3 else 0.0
    merged = tl.full([WIDTH], empty, tl.float64)
    for start in range(begin, end, WIDTH):
        here = start + rows < end
        values = tl.load(source + (start + rows) * row_stride + COLUMN * column_stride, mask=here, other=empty)
        if COLUMN == 2:
            merged = tl.minimum(merged, values)
        elif COLUMN == 3:
            merged = tl.maximum(merged, values)
        else:
            merged += values
    if COLUMN == 2:
        found = tl.min(merged)
    elif COLUMN == 3:
        found = tl.max(merged)
    else:
        found = tl.sum(merged)
    return found


@triton.jit
def merge_chunks(
    inputs, sizes, codes, firsts, partial, rows, num_tensors, num_chunks, WIDE: tl.constexpr, FACTORS: tl.constexpr
):
    """Merge the partial rows of one tensor into its row."""
    index = tl.program_id(0)
    begin = tl.load(firsts + index)
    end = tl.load(firsts + index + 1)
    columns: tl.constexpr = WIDE_COLUMNS if WIDE else COLUMNS
    place = rows + index * columns
    for column in tl.static_range(WIDE_COLUMNS - 1 if WIDE else COLUMNS):
        tl.store(place + column, merge_column(partial, 1, num_chunks, begin, end, column, 128))
    if WIDE:
        pivot = tl.full([], 0.0, tl.float64)
        if (tl.load(codes + index) == FLOAT64) & (tl.load(sizes + index) > 0):
            first = number_at(inputs, num_tensors)
            second = number_at(inputs, num_tensors + 1)
            pivot = _first_element(tl.load(inputs + index), first, second, FACTORS)
        tl.store(place + WIDE_COLUMNS - 1, pivot)
