"""Compiled loops over the memory of gradients: one pass measures them, one pass scales them.

The elements of all tensors lie on one line, each tensor rounded up to whole cache lines, and the line is cut
into items of equal length. Threads take items until none is left; what an item finds depends on nothing but the
item, so the result is the same for any number of threads. The threads are the team of OpenMP that
torch computes with, where there is one, since it is awake during a training.

All that is compiled into these loops is in this file, since the compiler's cache asks only whether it has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, config, njit, types
from numba.extending import intrinsic, overload

from gradtrack.support.interrupts import pass_on

if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set: expected a compiler. Unset it to use the native engine.")

Value: TypeAlias = Any
"""A number or an array whose type only the compiler knows."""
_Function = TypeVar("_Function", bound=Callable[..., Value])

FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = range(4)
ADDRESS, SIZE, CODE, GROUP, START = range(5)
"""Rows of the integer table that describes the tensors; START has one entry more than there are tensors."""
NUM_FACTS = 5
COLUMNS = 8
"""Sum, sum of squares, minimum, maximum, zeros, NaN, +Inf, -Inf."""
_LOW, _HIGH = 2, 3
TABLE, NUM_COLUMNS, RESULTS, NUM_ROWS, NUM_SLOTS, HEADS, NUM_HEADS, COUNTS, LIMIT, EPSILON = range(10)
"""The orders of a plan: addresses and sizes of its arrays, and the bits of the limit of the norm and of what is added
to the norm. The results have a row per tensor, per group and for all, in each slot; the heads have a row per item, and
the counts the elements of each group and of all."""
TEAM, SEAT, SEATS, WORK = range(10, 14)
"""Who works: the addresses of what runs a team and of what numbers its threads, their number (one needs no team), and
the address of their work."""
HIDES, _SCALES, _TAKEN, _ROWS, _FIRST, _SECOND = range(14, 20)
"""Written by the loops: whether the mean hides a variance, whether the work is to scale, the items taken (of a line
that caches may hold a bit each, of a longer one tickets), the address of the slot, and the bits of the factors."""
NUM_ORDERS = 20
ITEM_ELEMENTS = 131072
RUN_ITEMS = 16
SHORT_LINE = 4 * ITEM_ELEMENTS
"""The longest line that one thread works on alone; a longer one is worth calling a team for, asleep or not."""
CACHED_LINE = 16 * ITEM_ELEMENTS
"""The longest line that caches may hold."""
HIDDEN = 1e-6
"""A variance below this share of the mean square has lost more than six of its sixteen digits."""
NO_MEMORY = -2.0
BLOCK_ELEMENTS = 4096
LINE_ELEMENTS = 64

_LARGEST = 1e16  # the squares of a whole block still fit into a float32
_SMALLEST = 1e-12  # its square, and those that matter beside it, are normal float32 numbers
_INFINITY_KEY = 0x7F800000
_INFINITY_KEY_64 = 0x7FF0000000000000
_NEGATIVE_INFINITY_64 = -0x10000000000000
_MAGNITUDE_64 = 0x7FFFFFFFFFFFFFFF
_HALF_BITS = 0x3F000000


def compiled(function: _Function) -> _Function:
    """Compile a function into those that call it."""
    return cast("_Function", njit(nogil=True)(function))


def compiled_freely(function: _Function) -> _Function:
    """Compile a function whose sums may be taken in any order, so that they run on vectors."""
    return cast("_Function", njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})(function))


def compiled_now(signature: str) -> Callable[[_Function], _Function]:
    """Compile a function at import, or load it from the cache on disk."""

    def compile_or_load(function: _Function) -> _Function:
        return cast("_Function", _cached(njit, function, signature, nogil=True))

    return compile_or_load


def _compiled_for_a_team(function: Callable[..., Value]) -> Any:
    """Compile a function that a team of OpenMP runs: it is given the address of the orders."""
    return _cached(cfunc, function, types.void(types.voidptr))


def _cached(compiler: Callable[..., Any], function: Callable[..., Value], signature: Any, **options: Any) -> Any:
    try:
        return compiler(signature, cache=True, **options)(function)
    except Exception as fault:  # no directory can be written, or what is in it is damaged
        pass_on(fault)
        return compiler(signature, **options)(function)


def _emitted(function: Callable[..., Value]) -> Callable[..., Value]:
    """Let a function write its own instructions."""
    return cast("Callable[..., Value]", intrinsic(function))


def _chosen_for(function: Callable[..., Value]) -> Callable[[Callable[..., Value]], Callable[..., Value]]:
    """Let a function choose the code of another by the types of its arguments."""
    return cast("Callable[[Callable[..., Value]], Callable[..., Value]]", overload(function))


@_emitted
def _pointer(typingctx: Value, address: Value) -> Value:
    """Turn an integer into the address it stands for."""

    def generate(context: Value, builder: Value, signature: Value, args: Value) -> Value:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@_emitted
def _reinterpret(typingctx: Value, value: Value) -> Value:
    """Read the bits of an integer as a floating-point number of the same width, or the reverse."""
    twins = {types.int32: types.float32, types.int64: types.float64}
    twins |= {of_float: of_integer for of_integer, of_float in twins.items()}

    def generate(context: Value, builder: Value, signature: Value, args: Value) -> Value:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return twins[value](value), generate


def _emit_exchange(operation: str) -> Value:
    def generate(context: Value, builder: Value, signature: Value, args: Value) -> Value:
        pointer = builder.inttoptr(args[0], context.get_value_type(types.CPointer(types.int64)))
        return builder.atomic_rmw(operation, pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@_emitted
def _fetch_add(typingctx: Value, address: Value, amount: Value) -> Value:
    """Add to the integer at an address, whole and visible to all threads, and return what was there."""
    return _emit_exchange("add")


@_emitted
def _fetch_or(typingctx: Value, address: Value, bits: Value) -> Value:
    """Set bits of the integer at an address, whole and visible to all threads, and return what was there."""
    return _emit_exchange("or")


@_emitted
def _run(typingctx: Value, team: Value, work: Value, orders: Value, seats: Value) -> Value:
    """Let the team at an address (a GOMP_parallel) run work(orders) on so many threads, this one among them."""

    def generate(context: Value, builder: Value, signature: Value, args: Value) -> Value:
        place, number = context.get_value_type(types.voidptr), context.get_value_type(types.uint32)
        function = ir.FunctionType(ir.VoidType(), [place, place, number, number]).as_pointer()
        given = [*(builder.inttoptr(address, place) for address in args[1:3]), builder.trunc(args[3], number)]
        builder.call(builder.inttoptr(args[0], function), [*given, number(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@_emitted
def _call(typingctx: Value, address: Value) -> Value:
    """Call the function of no arguments at an address (an omp_get_thread_num)."""

    def generate(context: Value, builder: Value, signature: Value, args: Value) -> Value:
        function = ir.FunctionType(context.get_value_type(types.int32), []).as_pointer()
        return builder.sext(builder.call(builder.inttoptr(args[0], function), []), context.get_value_type(types.int64))

    return types.int64(types.int64), generate


def _single_bits(word: Value) -> Value:
    """Return the bits of the float32 that a stored word stands for; the word's type tells the format."""


@_chosen_for(_single_bits)
def _overload_single_bits(word: Value) -> Value:
    if word == types.int32:  # float32
        return _keep_single
    if word == types.uint16:  # bfloat16
        return _widen_brain
    if word == types.int16:  # float16
        return _widen_half
    return None


def _keep_single(word: Value) -> Value:
    return word


def _widen_brain(word: Value) -> Value:
    return np.int32(np.uint32(word) << 16)


def _widen_half(word: Value) -> Value:
    """Widen a float16 by integer arithmetic: subnormals survive a flush-to-zero mode, no F16C is needed."""
    magnitude = np.int32(word & 0x7FFF)
    tiny = _reinterpret(np.float32(magnitude) * np.float32(2.0**-24))
    bits = np.int32((magnitude << 13) + 0x38000000)
    bits = np.int32(bits + 0x38000000) if magnitude >= 0x7C00 else bits
    bits = tiny if magnitude < 0x400 else bits
    return np.int32(bits | (np.int32(word) & np.int32(-0x80000000)))


@compiled
def _key(bits: Value) -> Value:
    """Map the bits of a float32 to an integer that sorts like the number (and back)."""
    return np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@compiled
def _key_64(bits: Value) -> Value:
    """Map the bits of a float64 to an integer that sorts like the number (and back)."""
    return bits ^ ((bits >> 63) & _MAGNITUDE_64)


@compiled_freely
def _scan(words: Value) -> Value:
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


@compiled_freely
def _scan_carefully(words: Value) -> Value:
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


@compiled
def _add_block(words: Value, row: Value) -> Value:
    """Measure one block of float32, bfloat16 or float16 and add it to a row."""
    total, squares, low, high, zeros = _scan(words)
    row[4] += zeros
    largest = max(_reinterpret(_key(high)), -_reinterpret(_key(low)))
    finite = high < _INFINITY_KEY and low >= -_INFINITY_KEY
    ordinary = largest == 0.0 or _SMALLEST <= largest <= _LARGEST
    spread = np.float64(total) * total <= 0.5 * words.size * np.float64(squares)
    if finite and ordinary and spread:
        _add(row, total, squares, _reinterpret(_key(low)), _reinterpret(_key(high)))
    else:
        _add_carefully(words, row)


@compiled
def _add_carefully(words: Value, row: Value) -> Value:
    """Measure one difficult block again, in float64, and add it to a row."""
    total, squares, low, high, nans, positive, negative = _scan_carefully(words)
    if low <= high:
        _add(row, total, squares, _reinterpret(_key(low)), _reinterpret(_key(high)))
    row[5] += nans
    row[6] += positive
    row[7] += negative


@compiled
def _add(row: Value, total: Value, squares: Value, low: Value, high: Value) -> Value:
    row[0] += total
    row[1] += squares
    row[2] = min(row[2], np.float64(low))
    row[3] = max(row[3], np.float64(high))


@compiled_freely
def _scan_double(words: Value) -> Value:
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
        zeros += (bits & _MAGNITUDE_64) == 0
    return total, squares, low, high, zeros


@compiled  # freely, the factors could be joined into an infinity
def _scan_double_carefully(words: Value, first: Value, second: Value) -> Value:
    """Sum the finite elements of a block of float64, times both factors, and count the others."""
    total, squares = 0.0, 0.0
    low, high = np.int64(_MAGNITUDE_64), np.int64(-_MAGNITUDE_64 - 1)
    nans, positive, negative = 0, 0, 0
    for i in range(words.size):
        bits = words[i]
        magnitude = bits & _MAGNITUDE_64
        finite = magnitude < _INFINITY_KEY_64
        value = _reinterpret(np.int64(bits if finite else 0)) * first * second
        key = _key_64(bits)
        total += value
        squares += value * value
        low = min(low, np.int64(key if finite else _MAGNITUDE_64))
        high = max(high, np.int64(key if finite else -_MAGNITUDE_64 - 1))
        nans += magnitude > _INFINITY_KEY_64
        positive += bits == _INFINITY_KEY_64
        negative += bits == _NEGATIVE_INFINITY_64
    return total, squares, low, high, nans, positive, negative


@compiled
def _add_double_block(words: Value, row: Value, first: Value, second: Value) -> Value:
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


@compiled
def _clear(row: Value) -> Value:
    row[:] = 0.0
    row[2] = np.inf
    row[3] = -np.inf


@compiled
def _merge(row: Value, other: Value) -> Value:
    _add(row, other[0], other[1], other[2], other[3])
    for column in range(4, COLUMNS):
        row[column] += other[column]


@compiled
def _width(code: Value) -> Value:
    """Return the bytes of an element."""
    if code == FLOAT32:
        return 4
    return 8 if code == FLOAT64 else 2


@compiled
def _measure_part(
    table: Value, tensor: Value, begin: Value, end: Value, row: Value, first: Value, second: Value
) -> Value:
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


@compiled
def _count_freed(table: Value) -> Value:
    """Return how many tensors have elements and no memory, since its owner has freed it."""
    num_freed = 0
    for tensor in range(table.shape[1] - 1):
        num_freed += table[ADDRESS, tensor] == 0 and table[SIZE, tensor] > 0
    return num_freed


@compiled
def _orders_at(place: Value) -> Value:
    return carray(_pointer(place), NUM_ORDERS, np.int64)


@compiled
def _table_of(orders: Value) -> Value:
    return carray(_pointer(orders[TABLE]), (NUM_FACTS, orders[NUM_COLUMNS]), np.int64)


@compiled
def _rows_of(orders: Value) -> Value:
    """Return the rows of the slot that is measured into."""
    return carray(_pointer(orders[_ROWS]), (orders[NUM_ROWS], COLUMNS), np.float64)


@compiled
def _heads_of(orders: Value) -> Value:
    return carray(_pointer(orders[HEADS]), (orders[NUM_HEADS], COLUMNS), np.float64)


@compiled
def _take(table: Value, orders: Value, seat: Value) -> Value:
    """Return the first and the last (exclusive) of the items that no thread has taken; none when they are equal.

    Of a line that caches may hold, a thread first takes its share of each tensor: what torch's thread of the same
    number wrote. Most of a longer line goes in runs, as memory reads faster the longer a thread goes straight on; the
    end goes item by item, so that all threads end together.
    """
    length, seats, taken = table[START, -1], orders[SEATS], orders.ctypes.data + 8 * _TAKEN
    num_items = (length + ITEM_ELEMENTS - 1) // ITEM_ELEMENTS
    if length <= CACHED_LINE:
        for distance in range(seats):
            if _fetch_or(taken, 0) == (1 << num_items) - 1:
                break
            for item in range(num_items):
                bit, owner = 1 << item, _owner(table, item, seats)
                if (owner + distance) % seats == seat and not _fetch_or(taken, bit) & bit:
                    return item, item + 1
        return num_items, num_items
    ticket = _fetch_add(taken, 1)
    num_runs = num_items * 7 // 8 // RUN_ITEMS
    if ticket < num_runs:
        return ticket * RUN_ITEMS, (ticket + 1) * RUN_ITEMS
    first = min(ticket - num_runs + num_runs * RUN_ITEMS, num_items)
    return first, min(first + 1, num_items)


@compiled
def _owner(table: Value, item: Value, seats: Value) -> Value:
    """Return the seat of the thread whose share of a tensor the middle of an item is."""
    middle = min(item * ITEM_ELEMENTS + ITEM_ELEMENTS // 2, table[START, -1] - 1)
    tensor = _tensor_at(table, middle)
    start = table[START, tensor]
    return (middle - start) * seats // (table[START, tensor + 1] - start)


@compiled
def _tensor_at(table: Value, position: Value) -> Value:
    """Return the tensor that covers a position of the line."""
    return np.searchsorted(table[START], position, side="right") - 1


@compiled
def _measure_item(table: Value, item: Value, results: Value, head: Value, first: Value, second: Value) -> Value:
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


@compiled
def _is_one_sided(row: Value) -> Value:
    """Say whether there are elements, and none of them on the other side of zero."""
    return row[_LOW] <= row[_HIGH] and (row[_LOW] > 0.0 or row[_HIGH] < 0.0)


@compiled
def _merge_all(table: Value, results: Value, heads: Value) -> Value:
    """Merge heads into the rows of tensors, those into the rows of groups, and those into the last row."""
    num_tensors, total = table.shape[1] - 1, results.shape[0] - 1
    num_items = (table[START, num_tensors] + ITEM_ELEMENTS - 1) // ITEM_ELEMENTS
    for item in range(num_items):
        tensor = _tensor_at(table, item * ITEM_ELEMENTS)
        if tensor < num_tensors and table[START, tensor] < item * ITEM_ELEMENTS:
            _merge(results[tensor], heads[item])
    for tensor in range(num_tensors):
        _merge(results[num_tensors + table[GROUP, tensor]], results[tensor])
    for group in range(num_tensors, total):
        _merge(results[total], results[group])


@compiled
def _is_hidden(row: Value, count: Value) -> Value:
    """Say whether elements lie so close together that their sums do not tell their variance."""
    return row[0] * row[0] > (1.0 - HIDDEN) * count * row[1]


@compiled
def _hides_any(orders: Value) -> Value:
    """Say whether the variance of a tensor is hidden, or that of a group by tensors of one element."""
    table, results = _table_of(orders), _rows_of(orders)
    num_tensors, total = table.shape[1] - 1, results.shape[0] - 1
    counts = carray(_pointer(orders[COUNTS]), total + 1 - num_tensors, np.int64)
    for tensor in range(num_tensors):
        row = results[tensor]
        if not _is_one_sided(row) or not _is_hidden(row, table[SIZE, tensor]):
            continue
        for whole in (num_tensors + table[GROUP, tensor], total):
            count = counts[whole - num_tensors]
            if table[SIZE, tensor] > 1 or (count > 1 and _is_hidden(results[whole], count)):
                return True
    return False


@compiled
def _round_to_bfloat16(value: Value) -> Value:
    """Round a float32 to the nearest bfloat16, ties to even; return 32 bits of which the upper half are its own.

    A NaN stays one whose sign and payload are its own.
    """
    bits = np.uint32(_reinterpret(value))
    return np.uint32(bits + np.uint32(0x7FFF) + np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1)))


@compiled
def _round_to_float16(value: Value) -> Value:
    """Round a float32 to the nearest float16, ties to even, and return its bits."""
    bits = _reinterpret(value)
    magnitude = np.int32(bits & 0x7FFFFFFF)
    normal = np.int32((magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13)
    tiny = np.int32(_reinterpret(_reinterpret(magnitude) + np.float32(0.5)) - _HALF_BITS)
    half = tiny if magnitude < 0x38800000 else normal
    half = np.int32(0x7C00) if magnitude >= 0x477FF000 else half
    half = np.int32(0x7E00) if magnitude > _INFINITY_KEY else half
    return np.int16(half | ((bits >> 16) & 0x8000))


@compiled
def _scale_words(words: Value, factor: Value) -> Value:
    for i in range(words.size):
        words[i] *= factor


@compiled
def _scale_brains(words: Value, factor: Value) -> Value:
    for i in range(words.size):
        words[i] = _round_to_bfloat16(_reinterpret(_single_bits(words[i])) * factor) >> np.uint32(16)


@compiled
def _scale_pairs_of_brains(pairs: Value, factor: Value) -> Value:
    """Scale two bfloat16 at a time, which spares the vectors from being widened and narrowed."""
    for i in range(pairs.size):
        pair, upper = np.uint32(pairs[i]), np.uint32(0xFFFF0000)
        low = _round_to_bfloat16(_reinterpret(np.int32(pair << np.uint32(16))) * factor)
        high = _round_to_bfloat16(_reinterpret(np.int32(pair & upper)) * factor)
        pairs[i] = np.uint32(np.uint32(low >> np.uint32(16)) | np.uint32(high & upper))


@compiled
def _scale_halves(words: Value, factor: Value) -> Value:
    for i in range(words.size):
        words[i] = _round_to_float16(_reinterpret(_single_bits(words[i])) * factor)


@compiled
def _scale_part(table: Value, tensor: Value, begin: Value, end: Value, coefficient: Value) -> Value:
    """Multiply the elements from begin to end of a tensor."""
    code, size = table[CODE, tensor], end - begin
    place = table[ADDRESS, tensor] + begin * _width(code)
    address = _pointer(place)
    if code == FLOAT32:
        _scale_words(carray(address, size, np.float32), np.float32(coefficient))
    elif code == FLOAT64:
        _scale_words(carray(address, size, np.float64), coefficient)
    elif code == BFLOAT16:
        num_pairs = size // 2 if place % 4 == 0 else 0
        _scale_pairs_of_brains(carray(address, num_pairs, np.uint32), np.float32(coefficient))
        rest = _pointer(place + 4 * num_pairs)
        _scale_brains(carray(rest, size - 2 * num_pairs, np.uint16), np.float32(coefficient))
    else:
        _scale_halves(carray(address, size, np.int16), np.float32(coefficient))


@compiled
def _scale_item(table: Value, item: Value, coefficient: Value) -> Value:
    """Multiply the elements of one item."""
    begin, end = item * ITEM_ELEMENTS, (item + 1) * ITEM_ELEMENTS
    tensor = _tensor_at(table, begin)
    while tensor < table.shape[1] - 1 and table[START, tensor] < end:
        start = table[START, tensor]
        stop = min(table[SIZE, tensor], end - start)
        _scale_part(table, tensor, max(begin - start, 0), stop, coefficient)
        tensor += 1


@compiled
def _work(place: Value, seat: Value) -> Value:
    """Measure or scale items until none is left to take."""
    orders = _orders_at(place)
    table, results, heads = _table_of(orders), _rows_of(orders), _heads_of(orders)
    first, second = _reinterpret(orders[_FIRST]), _reinterpret(orders[_SECOND])
    begin, end = _take(table, orders, seat)
    while begin < end:
        for item in range(begin, end):
            if orders[_SCALES]:
                _scale_item(table, item, first)
            else:
                _measure_item(table, item, results, heads[item], first, second)
        begin, end = _take(table, orders, seat)


@_compiled_for_a_team
def _work_in_team(place: Value) -> None:
    orders = carray(place, NUM_ORDERS, np.int64)
    _work(orders.ctypes.data, _call(orders[SEAT]))


WORK_IN_TEAM: int = _work_in_team.address
"""What the orders have at WORK."""


@compiled
def _work_together(place: Value, scales: Value, first: Value, second: Value) -> Value:
    """Measure or scale the whole line, times both factors, in a team where there is one."""
    orders = _orders_at(place)
    orders[_TAKEN], orders[_SCALES] = 0, scales
    orders[_FIRST], orders[_SECOND] = _reinterpret(first), _reinterpret(second)
    if orders[SEATS] > 1:
        _run(orders[TEAM], orders[WORK], place, orders[SEATS])
    else:
        _work(place, 0)


@compiled_now("void(int64, float64)")
def scale(place: int, coefficient: float) -> None:
    """Multiply the gradients in the table of the orders at an address."""
    _work_together(place, 1, coefficient, 1.0)


@compiled_now("float64(int64, int64, float64, float64, int64)")
def look(place: int, slot: int, low: float, high: float, exponent: int) -> Value:
    """Measure into a slot as the orders at an address say, and clip where ln of the norm is between two bounds.

    Elements are measured times 2**-exponent, in two factors, since one alone may be out of range.

    Return the norm; NaN where it is not, or where what was measured does not tell all, such as the variance: then the
    gradients stay as they are. Return -1 where there is no such slot, and NO_MEMORY where there are no elements. An
    array is taken apart by its caller, a number is not: hence the address.
    """
    orders = _orders_at(place)
    if not 0 <= slot < orders[NUM_SLOTS]:
        return -1.0
    table = _table_of(orders)
    if _count_freed(table):
        return NO_MEMORY
    orders[_ROWS] = orders[RESULTS] + 8 * COLUMNS * orders[NUM_ROWS] * slot
    results = _rows_of(orders)
    for row in range(results.shape[0]):
        _clear(results[row])
    _work_together(place, 0, math.ldexp(1.0, -(exponent // 2)), math.ldexp(1.0, exponent // 2 - exponent))
    _merge_all(table, results, _heads_of(orders))
    orders[HIDES] = _hides_any(orders)
    total = results[-1]
    norm = np.sqrt(total[1])
    if orders[HIDES] or total[5] + total[6] + total[7] > 0.0 or not low < np.log(norm) < high:
        norm = np.nan
    coefficient = _reinterpret(orders[LIMIT]) / (norm + _reinterpret(orders[EPSILON]))
    if coefficient < 1.0:
        scale(place, coefficient)
    return norm
