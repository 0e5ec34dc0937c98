"""The kernels of the Triton engine that protect gradients: they decide from the sums, and change what has to change.

No program reads or writes a gradient where nothing engages. What the host decides by, such as the limit, lies among the
addresses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradtrack.gradients.triton.kernels import TILE, load_tile, merge_column, number_at

LIMIT: tl.constexpr = tl.constexpr(2)
EPSILON: tl.constexpr = tl.constexpr(3)
NAN_VALUES: tl.constexpr = tl.constexpr(4)
INFINITY_VALUES: tl.constexpr = tl.constexpr(8)
LIMITS: tl.constexpr = tl.constexpr(12)
NUM_NUMBERS: tl.constexpr = tl.constexpr(16)
"""The places of the numbers after the addresses: two factors, the limit, the epsilon, and by type what replaces NaN,
what replaces infinity, and the limit as the type holds it. The addresses of the weights follow."""
SMALLEST_FACTOR: tl.constexpr = tl.constexpr(2.0**-100)
SMALLEST_WEIGHT: tl.constexpr = tl.constexpr(1e-3)


@triton.jit
def decide(
    inputs,
    codes,
    rows,
    outcome,
    found_inf,
    num_tensors,
    COLUMNS: tl.constexpr,
    CLIPS: tl.constexpr,
    REPLACES: tl.constexpr,
):
    """Merge the rows of all tensors; write the coefficient, the number of non-finite elements and the flag to skip."""
    squares = merge_column(rows, COLUMNS, 1, 0, num_tensors, 1, 1024)
    bad = merge_column(rows, COLUMNS, 1, 0, num_tensors, 5, 1024)
    bad += merge_column(rows, COLUMNS, 1, 0, num_tensors, 6, 1024)
    bad += merge_column(rows, COLUMNS, 1, 0, num_tensors, 7, 1024)
    numbers = (inputs + num_tensors).to(tl.pointer_type(tl.float64))
    coefficient = tl.full([], 1.0, tl.float64)
    if CLIPS:
        if REPLACES:
            lanes = tl.arange(0, 128)
            added = tl.zeros([128], tl.float64)
            for start in range(0, num_tensors, 128):
                here = start + lanes < num_tensors
                place = rows + (start + lanes) * COLUMNS
                code = tl.load(codes + start + lanes, mask=here, other=0)
                nan = tl.load(numbers + NAN_VALUES + code, mask=here, other=0.0)
                infinity = tl.load(numbers + INFINITY_VALUES + code, mask=here, other=0.0)
                infinite = tl.load(place + 6, mask=here, other=0.0) + tl.load(place + 7, mask=here, other=0.0)
                added += tl.load(place + 5, mask=here, other=0.0) * nan * nan + infinite * infinity * infinity
            squares += tl.sum(added)
        norm = tl.sqrt(squares) + number_at(inputs, num_tensors + EPSILON)
        limit = number_at(inputs, num_tensors + LIMIT)
        coefficient = tl.where(norm > limit, limit / norm, 1.0)
        if not REPLACES:
            coefficient = tl.where(bad > 0, 1.0, coefficient)
    tl.store(outcome, coefficient)
    tl.store(outcome + 1, bad)
    tl.store(found_inf, tl.where(bad > 0, 1.0, 0.0))


@triton.jit
def _replaced(x, nan, infinity, REPLACES: tl.constexpr):
    """Replace what is not finite; an infinity keeps its sign."""
    if REPLACES:
        edge = float("inf")
        x = tl.where(x != x, nan.to(x.dtype), x)
        x = tl.where(x == edge, infinity.to(x.dtype), tl.where(x == -edge, -infinity.to(x.dtype), x))
    return x


@triton.jit
def _store(pointer, lanes, x, mask, TYPE: tl.constexpr, STORES: tl.constexpr):
    """Store a tile, rounded to even, if it is to be stored, and return what is stored in the wider type."""
    if TYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        stored = bits.to(tl.int16)
        x = (bits << 16).to(tl.float32, bitcast=True)
    elif TYPE == tl.float16:
        stored = x.to(tl.float16)
        x = stored.to(tl.float32)
    else:
        stored = x
    if STORES:
        if mask is None:
            tl.store(pointer + lanes, stored)
        else:
            tl.store(pointer + lanes, stored, mask=mask)
    return x


@triton.jit
def _changed(x, first, second, limit, nan, infinity, CLAMPS: tl.constexpr, REPLACES: tl.constexpr):
    """Return a tile scaled or clamped, and which elements were beyond the limit."""
    x = _replaced(x, nan, infinity, REPLACES)
    beyond = tl.abs(x) > limit
    if CLAMPS:
        x = tl.minimum(tl.maximum(x, -limit), limit)
    else:
        x = x * first * second
    return x, beyond


@triton.jit
def _change_chunk(
    address,
    start,
    left,
    coefficient,
    limit,
    nan,
    infinity,
    CODE: tl.constexpr,
    CHUNK: tl.constexpr,
    CLAMPS: tl.constexpr,
    REPLACES: tl.constexpr,
    STORES: tl.constexpr,
):
    """Change a chunk; return the number of its elements that were beyond the limit, and their squares afterwards."""
    TYPE: tl.constexpr = (
        tl.float32 if CODE == 0 else tl.float64 if CODE == 1 else tl.bfloat16 if CODE == 2 else tl.float16
    )
    wide: tl.constexpr = tl.float64 if TYPE == tl.float64 else tl.float32
    stored: tl.constexpr = tl.int16 if TYPE == tl.bfloat16 else TYPE
    address += start * (4 if CODE == 0 else 8 if CODE == 1 else 2)
    pointer = address.to(tl.pointer_type(stored))
    lanes = tl.arange(0, TILE)
    count = tl.zeros([TILE], tl.int32)
    squares = tl.zeros([TILE], tl.float64)
    # A float32 cannot hold the smallest coefficients: they are applied in two parts.
    part = tl.maximum(coefficient, SMALLEST_FACTOR)
    first = part.to(wide)
    second = (coefficient / part).to(wide)
    bound = limit.to(wide)
    if (left >= CHUNK) & (address % 16 == 0):
        aligned = tl.multiple_of(pointer, 16)
        for place in range(0, CHUNK, TILE):
            x = load_tile(aligned + place, lanes, None, TYPE)
            x, beyond = _changed(x, first, second, bound, nan, infinity, CLAMPS, REPLACES)
            x = _store(aligned + place, lanes, x, None, TYPE, STORES).to(tl.float64)
            if CLAMPS:
                squares += x * x
                count += beyond.to(tl.int32)
    else:
        for place in range(0, tl.minimum(left, CHUNK).to(tl.int32), TILE):
            here = place + lanes < left
            x = load_tile(pointer + place, lanes, here, TYPE)
            x, beyond = _changed(x, first, second, bound, nan, infinity, CLAMPS, REPLACES)
            x = _store(pointer + place, lanes, x, here, TYPE, STORES).to(tl.float64)
            if CLAMPS:
                squares += tl.where(here, x * x, 0.0)
                count += (beyond & here).to(tl.int32)
    return tl.sum(count).to(tl.float64), tl.sum(squares)


@triton.jit
def change(
    inputs,
    sizes,
    codes,
    firsts,
    tensor_of,
    partial,
    rows,
    outcome,
    after,
    num_tensors,
    num_chunks,
    TYPES: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    CLAMPS: tl.constexpr,
    REPLACES: tl.constexpr,
    STORES: tl.constexpr,
):
    """Scale or clamp one chunk and replace what is not finite, if any of this engages in its tensor.

    Without STORES count what would change, and change nothing.
    """
    chunk = tl.program_id(0)
    index = tl.load(tensor_of + chunk)
    place = rows + index * COLUMNS
    code = tl.load(codes + index)
    nan_count = tl.load(place + 5)
    infinite = tl.load(place + 6) + tl.load(place + 7)
    nan = number_at(inputs, num_tensors + NAN_VALUES + code)
    infinity = number_at(inputs, num_tensors + INFINITY_VALUES + code)
    limit = number_at(inputs, num_tensors + LIMITS + code)
    coefficient = tl.load(outcome)
    if CLAMPS:
        edge = tl.maximum(-tl.load(place + 2), tl.load(place + 3))
        if REPLACES:
            edge = tl.maximum(edge, tl.where(nan_count > 0, tl.abs(nan), 0.0))
            edge = tl.maximum(edge, tl.where(infinite > 0, infinity, 0.0))
            engaged = edge > limit
        else:
            engaged = (edge > limit) & (tl.load(outcome + 1) == 0)
    else:
        engaged = coefficient < 1.0
    if REPLACES:
        engaged = engaged | (nan_count + infinite > 0)
    count = tl.full([], 0.0, tl.float64)
    squares = tl.load(partial + num_chunks + chunk)
    if engaged:
        start = (chunk - tl.load(firsts + index)).to(tl.int64) * CHUNK
        left = tl.load(sizes + index) - start
        address = tl.load(inputs + index)
        for kind in tl.static_range(4):
            if (TYPES >> kind) & 1:
                if code == kind:
                    count, squares = _change_chunk(
                        address, start, left, coefficient, limit, nan, infinity, kind, CHUNK, CLAMPS, REPLACES, STORES
                    )
    if CLAMPS:
        tl.store(after + chunk, count)
        tl.store(after + num_chunks + chunk, squares)


@triton.jit
def _limit_unit(
    address, weights, start, length, factor, nan, infinity, spared, has_bad, CODE: tl.constexpr, REPLACES: tl.constexpr
):
    """Scale one unit if its norm is above its limit; return whether it was, and its squares afterwards."""
    TYPE: tl.constexpr = (
        tl.float32 if CODE == 0 else tl.float64 if CODE == 1 else tl.bfloat16 if CODE == 2 else tl.float16
    )
    wide: tl.constexpr = tl.float64 if TYPE == tl.float64 else tl.float32
    stored: tl.constexpr = tl.int16 if TYPE == tl.bfloat16 else TYPE
    pointer = address.to(tl.pointer_type(stored)) + start
    weight = weights.to(tl.pointer_type(stored)) + start
    lanes = tl.arange(0, TILE)
    squares = tl.zeros([TILE], tl.float64)
    weight_squares = tl.zeros([TILE], tl.float64)
    for place in range(0, length, TILE):
        here = place + lanes < length
        x = load_tile(pointer + place, lanes, here, TYPE)
        finite = tl.abs(x) < float("inf")
        x = tl.where(finite, x, _replaced(x, nan, infinity, REPLACES) if REPLACES else 0.0).to(tl.float64)
        squares += x * x
        w = load_tile(weight + place, lanes, here, TYPE).to(tl.float64)
        weight_squares += w * w
    before = tl.sum(squares)
    norm = tl.sqrt(before)
    limit = tl.maximum(tl.sqrt(tl.sum(weight_squares)), SMALLEST_WEIGHT) * factor
    beyond = (norm > limit) & (spared == 0)
    after = before
    if beyond | has_bad:
        scale = tl.where(beyond, limit / tl.where(beyond, norm, 1.0), 1.0).to(wide)
        found = tl.zeros([TILE], tl.float64)
        for place in range(0, length, TILE):
            here = place + lanes < length
            x = _replaced(load_tile(pointer + place, lanes, here, TYPE), nan, infinity, REPLACES) * scale
            x = _store(pointer + place, lanes, x, here, TYPE, True).to(tl.float64)
            found += tl.where(here, x * x, 0.0)
        after = tl.sum(found)
    return tl.where(beyond, 1.0, 0.0).to(tl.float64), after


@triton.jit
def limit_units(
    inputs,
    sizes,
    codes,
    unit_firsts,
    tensor_of_unit,
    rows,
    outcome,
    after,
    num_tensors,
    num_units,
    TYPES: tl.constexpr,
    COLUMNS: tl.constexpr,
    REPLACES: tl.constexpr,
):
    """Limit the norm of one unit, a row or a whole vector, by that of its weights (AGC)."""
    unit = tl.program_id(0)
    index = tl.load(tensor_of_unit + unit)
    first_unit = tl.load(unit_firsts + index)
    length = (tl.load(sizes + index) // (tl.load(unit_firsts + index + 1) - first_unit)).to(tl.int32)
    start = (unit - first_unit).to(tl.int64) * length
    code = tl.load(codes + index)
    nan = number_at(inputs, num_tensors + NAN_VALUES + code)
    infinity = number_at(inputs, num_tensors + INFINITY_VALUES + code)
    factor = number_at(inputs, num_tensors + LIMIT)
    address = tl.load(inputs + index)
    weights = tl.load(inputs + num_tensors + NUM_NUMBERS + index)
    spared = tl.load(outcome + 1)
    has_bad = tl.full([], 0, tl.int1)
    if REPLACES:
        spared = tl.full([], 0.0, tl.float64)
        place = rows + index * COLUMNS
        has_bad = tl.load(place + 5) + tl.load(place + 6) + tl.load(place + 7) > 0
    count = tl.full([], 0.0, tl.float64)
    squares = tl.full([], 0.0, tl.float64)
    for kind in tl.static_range(4):
        if (TYPES >> kind) & 1:
            if code == kind:
                count, squares = _limit_unit(
                    address, weights, start, length, factor, nan, infinity, spared, has_bad, kind, REPLACES
                )
    tl.store(after + unit, count)
    tl.store(after + num_units + unit, squares)


@triton.jit
def merge_limited_chunks(after, firsts, limited, num_chunks):
    """Merge how much would be limited in each chunk of one tensor, and the squares afterwards."""
    index = tl.program_id(0)
    begin = tl.load(firsts + index)
    end = tl.load(firsts + index + 1)
    tl.store(limited + 2 * index, merge_column(after, 1, num_chunks, begin, end, 0, 128))
    tl.store(limited + 2 * index + 1, merge_column(after, 1, num_chunks, begin, end, 1, 128))


@triton.jit
def merge_limited(after, outcome, number):
    """Merge how much was limited in each chunk or unit, and the squares afterwards."""
    tl.store(outcome + 2, merge_column(after, 1, number, 0, number, 0, 1024))
    tl.store(outcome + 3, merge_column(after, 1, number, 0, number, 1, 1024))
