"""Compiled loops over the memory of gradients: one pass measures them, one pass scales them.

The elements of all tensors lie on one line, each tensor rounded up to whole cache lines, and the line is cut
into items of equal length. Threads take the next item from a shared counter; what an item finds depends on
nothing but the item, so the result is the same for any number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, overload

FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = range(4)
ADDRESS, SIZE, CODE, GROUP, START = range(5)
"""Rows of the integer table that describes the tensors; START has one entry more than there are tensors."""
COLUMNS = 8
"""Sum, sum of squares, minimum, maximum, zeros, NaN, +Inf, -Inf."""
TAKEN, DONE = range(2)
"""Progress: items handed out, items finished."""
ITEM_ELEMENTS = 131072
SHORT_LINE = 2 * ITEM_ELEMENTS
"""The longest line that one call measures or scales alone; a longer one is worth waking threads for."""
BLOCK_ELEMENTS = 4096
LINE_ELEMENTS = 64
PREPARE, WORK, MERGE = 1, 2, 4

_FAST = {"reassoc", "contract", "nsz"}
_LARGEST = 1e16  # the squares of a whole block still fit into a float32
_SMALLEST = 1e-12  # its square, and those that matter beside it, are normal float32 numbers
_INFINITY_KEY = 0x7F800000
_INFINITY_KEY_64 = 0x7FF0000000000000
_MAGNITUDE_64 = 0x7FFFFFFFFFFFFFFF
_HALF_BITS = 0x3F000000


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    """Turn an integer into the address it stands for."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic
def _reinterpret(typingctx: Any, value: Any) -> Any:
    """Read the bits of an integer as a floating-point number of the same width, or the reverse."""
    twins = {types.int32: types.float32, types.float32: types.int32, types.int64: types.float64}

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return twins[value](value), generate


@intrinsic
def _fetch_add(typingctx: Any, address: Any, amount: Any) -> Any:
    """Add to the integer at an address, whole and visible to all threads, and return what was there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


def _single_bits(word: Any) -> Any:
    """Return the bits of the float32 number that a stored word stands for (the word's type tells the format)."""


@overload(_single_bits)
def _overload_single_bits(word: Any) -> Any:
    if word == types.int32:  # float32
        return _keep_single
    if word == types.uint16:  # bfloat16
        return _widen_brain
    if word == types.int16:  # float16
        return _widen_half
    return None


def _keep_single(word: Any) -> Any:
    return word


def _widen_brain(word: Any) -> Any:
    return np.int32(np.uint32(word) << 16)


def _widen_half(word: Any) -> Any:
    """Widen a float16 by integer arithmetic: subnormals survive a flush-to-zero mode, no F16C is needed."""
    magnitude = np.int32(word & 0x7FFF)
    tiny = _reinterpret(np.float32(magnitude) * np.float32(2.0**-24))
    bits = np.int32((magnitude << 13) + 0x38000000)
    bits = np.int32(bits + 0x38000000) if magnitude >= 0x7C00 else bits
    bits = tiny if magnitude < 0x400 else bits
    return np.int32(bits | (np.int32(word) & np.int32(-0x80000000)))


@njit(nogil=True)
def _key(bits: Any) -> Any:
    """Map the bits of a float32 to an integer that sorts like the number (and back)."""
    return np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@njit(nogil=True)
def _key_64(bits: Any) -> Any:
    """Map the bits of a float64 to an integer that sorts like the number (and back)."""
    return bits ^ ((bits >> 63) & _MAGNITUDE_64)


@njit(nogil=True, fastmath=_FAST)
def _scan(words: Any) -> Any:
    """Sum a block in float32, right when every element is finite and of ordinary size."""
    total, squares = np.float32(0), np.float32(0)
    low, high, zeros = np.int32(0x7FFFFFFF), np.int32(-0x80000000), np.int32(0)
    for i in range(words.size):
        bits = _single_bits(words[i])
        value = _reinterpret(bits)
        key = _key(bits)
        total += value
        squares += value * value
        low = min(low, key)
        high = max(high, key)
        zeros = np.int32(zeros + ((bits & 0x7FFFFFFF) == 0))
    return total, squares, low, high, zeros


@njit(nogil=True, fastmath=_FAST)
def _scan_carefully(words: Any) -> Any:
    """Sum the finite elements of a block in float64 and count the others."""
    total, squares = 0.0, 0.0
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    nans, positive, negative = np.int32(0), np.int32(0), np.int32(0)
    for i in range(words.size):
        bits = _single_bits(words[i])
        magnitude = np.int32(bits & 0x7FFFFFFF)
        finite = magnitude < _INFINITY_KEY
        value = np.float64(_reinterpret(np.int32(bits if finite else 0)))
        key = _key(bits)
        total += value
        squares += value * value
        low = min(low, np.int32(key if finite else 0x7FFFFFFF))
        high = max(high, np.int32(key if finite else -0x80000000))
        nans = np.int32(nans + (magnitude > _INFINITY_KEY))
        positive = np.int32(positive + (bits == _INFINITY_KEY))
        negative = np.int32(negative + (bits == -0x800000))
    return total, squares, low, high, nans, positive, negative


@njit(nogil=True)
def _add_block(words: Any, row: Any) -> Any:
    """Measure one block of float32, bfloat16 or float16 and add it to a row."""
    total, squares, low, high, zeros = _scan(words)
    row[4] += zeros
    largest = max(_reinterpret(_key(high)), -_reinterpret(_key(low)))
    finite = high < _INFINITY_KEY and low >= -_INFINITY_KEY
    if finite:
        if largest == 0.0 or (
            _SMALLEST <= largest <= _LARGEST and np.float64(total) * total <= 0.5 * words.size * np.float64(squares)
        ):
            _add(row, total, squares, _reinterpret(_key(low)), _reinterpret(_key(high)))
            return
    _add_carefully(words, row)


@njit(nogil=True)
def _add_carefully(words: Any, row: Any) -> Any:
    """Measure one difficult block again, in float64, and add it to a row."""
    total, squares, low, high, nans, positive, negative = _scan_carefully(words)
    if low <= high:
        _add(row, total, squares, _reinterpret(_key(low)), _reinterpret(_key(high)))
    row[5] += nans
    row[6] += positive
    row[7] += negative


@njit(nogil=True)
def _add(row: Any, total: Any, squares: Any, low: Any, high: Any) -> Any:
    row[0] += total
    row[1] += squares
    row[2] = min(row[2], np.float64(low))
    row[3] = max(row[3], np.float64(high))


@njit(nogil=True)
def _times(value: Any, factor: Any) -> Any:
    """Multiply without the liberties of the summing loops, which could join two factors into an infinity."""
    return value * factor


@njit(nogil=True, fastmath=_FAST)
def _scan_double(words: Any) -> Any:
    """Sum a block of float64, right when every element is finite."""
    total, squares = 0.0, 0.0
    low, high, zeros = np.int64(_MAGNITUDE_64), np.int64(-_MAGNITUDE_64 - 1), 0
    for i in range(words.size):
        bits = words[i]
        value = _reinterpret(bits)
        key = _key_64(bits)
        total += value
        squares += value * value
        low = min(low, key)
        high = max(high, key)
        zeros += np.int64((bits & _MAGNITUDE_64) == 0)
    return total, squares, low, high, zeros


@njit(nogil=True, fastmath=_FAST)
def _scan_double_carefully(words: Any, first: Any, second: Any) -> Any:
    """Sum the finite elements of a block of float64, times both factors, and count the others."""
    total, squares = 0.0, 0.0
    low, high = np.int64(_MAGNITUDE_64), np.int64(-_MAGNITUDE_64 - 1)
    nans, positive, negative = 0, 0, 0
    for i in range(words.size):
        bits = words[i]
        magnitude = bits & _MAGNITUDE_64
        finite = magnitude < _INFINITY_KEY_64
        value = _times(_times(_reinterpret(np.int64(bits if finite else 0)), first), second)
        key = _key_64(bits)
        total += value
        squares += value * value
        low = min(low, key if finite else _MAGNITUDE_64)
        high = max(high, key if finite else -_MAGNITUDE_64 - 1)
        nans += np.int64(magnitude > _INFINITY_KEY_64)
        positive += np.int64(bits == _INFINITY_KEY_64)
        negative += np.int64(bits < 0 and magnitude == _INFINITY_KEY_64)
    return total, squares, low, high, nans, positive, negative


@njit(nogil=True)
def _add_double_block(words: Any, row: Any, first: Any, second: Any) -> Any:
    """Measure one block of float64, times both factors, and add it to a row."""
    total, squares, low, high, zeros = _scan_double(words)
    row[4] += zeros
    finite = high < _INFINITY_KEY_64 and low >= -_INFINITY_KEY_64
    if not finite or first != 1.0 or second != 1.0:
        again = _scan_double_carefully(words, first, second)
        total, squares, low, high, nans, positive, negative = again
        row[5] += nans
        row[6] += positive
        row[7] += negative
    if low <= high:
        smallest, largest = _reinterpret(_key_64(low)), _reinterpret(_key_64(high))
        _add(row, total, squares, smallest * first * second, largest * first * second)


@njit(nogil=True)
def _clear(row: Any) -> Any:
    row[:] = 0.0
    row[2] = np.inf
    row[3] = -np.inf


@njit(nogil=True)
def _merge(row: Any, other: Any) -> Any:
    _add(row, other[0], other[1], other[2], other[3])
    for column in range(4, COLUMNS):
        row[column] += other[column]


@njit(nogil=True)
def _width(code: Any) -> Any:
    """Return the bytes of an element."""
    if code == FLOAT32:
        return 4
    return 8 if code == FLOAT64 else 2


@njit(nogil=True)
def _measure_part(table: Any, tensor: Any, begin: Any, end: Any, row: Any, first: Any, second: Any) -> Any:
    """Fill a row with what the elements from begin to end of a tensor hold, times both factors."""
    _clear(row)
    code = table[CODE, tensor]
    for start in range(begin, end, BLOCK_ELEMENTS):
        address = _pointer(table[ADDRESS, tensor] + start * _width(code))
        size = min(BLOCK_ELEMENTS, end - start)
        if code == FLOAT32:
            _add_block(carray(address, size, np.int32), row)
        elif code == BFLOAT16:
            _add_block(carray(address, size, np.uint16), row)
        elif code == FLOAT16:
            _add_block(carray(address, size, np.int16), row)
        else:
            _add_double_block(carray(address, size, np.int64), row, first, second)
    if code != FLOAT64:
        for column in (0, 1, 1, 2, 3):
            row[column] = row[column] * first * second


@njit(nogil=True)
def _lay_out(table: Any) -> Any:
    """Place the tensors on the line and return its length, or -1 when one of them has no memory."""
    num_tensors = table.shape[1] - 1
    position = 0
    for tensor in range(num_tensors):
        if table[ADDRESS, tensor] == 0 and table[SIZE, tensor] > 0:
            return np.int64(-1)
        table[START, tensor] = position
        position += (table[SIZE, tensor] + LINE_ELEMENTS - 1) // LINE_ELEMENTS * LINE_ELEMENTS
    table[START, num_tensors] = position
    return position


@njit(nogil=True)
def _take(progress: Any) -> Any:
    """Return the next item that no thread has taken."""
    return _fetch_add(progress.ctypes.data + 8 * TAKEN, 1)


@njit(nogil=True)
def _tensor_at(table: Any, position: Any) -> Any:
    """Return the tensor that covers a position of the line."""
    return np.searchsorted(table[START], position, side="right") - 1


@njit(nogil=True)
def _measure_item(table: Any, item: Any, results: Any, head: Any, first: Any, second: Any) -> Any:
    """Measure one item: a tensor that began in an earlier one goes to the head, the others to their rows."""
    begin, end = item * ITEM_ELEMENTS, (item + 1) * ITEM_ELEMENTS
    tensor = _tensor_at(table, begin)
    while tensor < table.shape[1] - 1 and table[START, tensor] < end:
        start = table[START, tensor]
        stop = min(table[SIZE, tensor], end - start)
        if start < begin:
            _measure_part(table, tensor, begin - start, stop, head, first, second)
        else:
            _measure_part(table, tensor, 0, stop, results[tensor], first, second)
        tensor += 1


@njit(nogil=True)
def _merge_all(table: Any, results: Any, heads: Any) -> Any:
    """Merge heads into the rows of tensors, those into the rows of groups, and those into the last row."""
    num_tensors, total = table.shape[1] - 1, results.shape[0] - 1
    for item in range(heads.shape[0]):
        tensor = _tensor_at(table, item * ITEM_ELEMENTS)
        if tensor < num_tensors and table[START, tensor] < item * ITEM_ELEMENTS:
            _merge(results[tensor], heads[item])
    for tensor in range(num_tensors):
        _merge(results[num_tensors + table[GROUP, tensor]], results[tensor])
    for group in range(num_tensors, total):
        _merge(results[total], results[group])


@njit(
    "int64(int64, int64[:, ::1], float64[:, ::1], float64[:, ::1], int64[::1], float64, float64)",
    cache=True,
    nogil=True,
)
def measure(phases: Any, table: Any, results: Any, heads: Any, progress: Any, first: Any, second: Any) -> Any:
    """Run the phases that are asked for and return the length of the line.

    The results hold a row per tensor, a row per group and the total; the heads a row per item. After preparing
    a line that is not short, or one with a tensor that has no memory (its length is -1), nothing else is run.
    """
    length = _lay_out(table) if phases & PREPARE else table[START, table.shape[1] - 1]
    if phases & PREPARE:
        for row in range(results.shape[0]):
            _clear(results[row])
        if not 0 <= length <= SHORT_LINE:
            return length
    if phases & WORK:
        item = _take(progress)
        while item * ITEM_ELEMENTS < length:
            _measure_item(table, item, results, heads[item], first, second)
            _fetch_add(progress.ctypes.data + 8 * DONE, 1)
            item = _take(progress)
    if phases & MERGE:
        _fetch_add(progress.ctypes.data + 8 * DONE, 0)  # sees what the threads wrote before they added
        _merge_all(table, results, heads)
    return length


@njit(nogil=True)
def _round_to_bfloat16(value: Any) -> Any:
    """Round a float32 to the nearest bfloat16, ties to even, and return its bits."""
    bits = _reinterpret(value)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.uint16(0x7FC0 if np.int32(bits & 0x7FFFFFFF) > _INFINITY_KEY else rounded)


@njit(nogil=True)
def _round_to_float16(value: Any) -> Any:
    """Round a float32 to the nearest float16, ties to even, and return its bits."""
    bits = _reinterpret(value)
    magnitude = np.int32(bits & 0x7FFFFFFF)
    normal = np.int32((magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13)
    tiny = np.int32(_reinterpret(_reinterpret(magnitude) + np.float32(0.5)) - _HALF_BITS)
    half = tiny if magnitude < 0x38800000 else normal
    half = np.int32(0x7C00) if magnitude >= 0x477FF000 else half
    half = np.int32(0x7E00) if magnitude > _INFINITY_KEY else half
    return np.int16(half | ((bits >> 16) & 0x8000))


@njit(nogil=True)
def _scale_words(words: Any, factor: Any) -> Any:
    for i in range(words.size):
        words[i] *= factor


@njit(nogil=True)
def _scale_brains(words: Any, factor: Any) -> Any:
    for i in range(words.size):
        words[i] = _round_to_bfloat16(_reinterpret(_single_bits(words[i])) * factor)


@njit(nogil=True)
def _scale_halves(words: Any, factor: Any) -> Any:
    for i in range(words.size):
        words[i] = _round_to_float16(_reinterpret(_single_bits(words[i])) * factor)


@njit(nogil=True)
def _scale_part(table: Any, tensor: Any, begin: Any, end: Any, coefficient: Any) -> Any:
    """Multiply the elements from begin to end of a tensor."""
    code, size = table[CODE, tensor], end - begin
    address = _pointer(table[ADDRESS, tensor] + begin * _width(code))
    if code == FLOAT32:
        _scale_words(carray(address, size, np.float32), np.float32(coefficient))
    elif code == FLOAT64:
        _scale_words(carray(address, size, np.float64), coefficient)
    elif code == BFLOAT16:
        _scale_brains(carray(address, size, np.uint16), np.float32(coefficient))
    else:
        _scale_halves(carray(address, size, np.int16), np.float32(coefficient))


@njit(nogil=True)
def _scale_item(table: Any, item: Any, coefficient: Any) -> Any:
    """Multiply the elements of one item."""
    begin, end = item * ITEM_ELEMENTS, (item + 1) * ITEM_ELEMENTS
    tensor = _tensor_at(table, begin)
    while tensor < table.shape[1] - 1 and table[START, tensor] < end:
        start = table[START, tensor]
        stop = min(table[SIZE, tensor], end - start)
        _scale_part(table, tensor, max(begin - start, 0), stop, coefficient)
        tensor += 1


@njit("int64(int64, int64[:, ::1], int64[::1], float64)", cache=True, nogil=True)
def scale(phases: Any, table: Any, progress: Any, coefficient: Any) -> Any:
    """Run the phases that are asked for (there is nothing to merge), as `measure` does."""
    length = _lay_out(table) if phases & PREPARE else table[START, table.shape[1] - 1]
    if phases & PREPARE and not 0 <= length <= SHORT_LINE:
        return length
    if phases & WORK:
        item = _take(progress)
        while item * ITEM_ELEMENTS < length:
            _scale_item(table, item, coefficient)
            _fetch_add(progress.ctypes.data + 8 * DONE, 1)
            item = _take(progress)
    return length
