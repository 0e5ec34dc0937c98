"""The native engine: measures and scales gradients in the memory of the CPU with compiled loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from struct import Struct
from typing import Any, final

import numpy as np
import torch
from torch.nn import Parameter

from gradtrack.errors import UsageError
from gradtrack.gradients.moments import SMALLEST_FACTOR, SMALLEST_SQUARES, SQUARES, Moments
from gradtrack.gradients.native import kernels
from gradtrack.gradients.native.kernels import Floats, Integers
from gradtrack.gradients.native.threads import helpers, team

_CODES = {
    torch.float32: kernels.FLOAT32,
    torch.float64: kernels.FLOAT64,
    torch.bfloat16: kernels.BFLOAT16,
    torch.float16: kernels.FLOAT16,
}
_PLAIN_TYPES = frozenset({torch.Tensor, Parameter})
_STRIDED = frozenset({torch.strided})
_layout = attrgetter("layout")
_dtype = attrgetter("dtype")
_is_cpu = attrgetter("is_cpu")
_is_contiguous, _numel, _data_ptr = torch.Tensor.is_contiguous, torch.Tensor.numel, torch.Tensor.data_ptr
_ALL_PHASES = kernels.PREPARE | kernels.WORK | kernels.MERGE
_ALL_IN_TEAM = kernels.PREPARE | kernels.TEAM_WORK | kernels.MERGE
_NUM_SHORT_ITEMS = kernels.SHORT_LINE // kernels.ITEM_ELEMENTS
_UNKNOWN = 0
"""The length of a line that the kernels have not prepared yet."""
MOST_SLOTS = 16
_SLOT_BYTES = 1 << 18
"""How many calls of `look` a plan has slots for, and how many bytes their results may take."""


@final
class Plan:
    """A plan to measure gradients of the same sizes at every step: all arguments of the kernels but the addresses.

    It holds the results of several calls, so it serves one training, in one thread.
    """

    def __init__(self, engine: NativeEngine, grads: Sequence[torch.Tensor], table: Integers) -> None:
        self.engine = engine
        self._dtypes, self._sizes = list(map(_dtype, grads)), list(map(_numel, grads))
        self.table = table.copy()
        self._put_addresses: Any = Struct(f"{len(grads)}q").pack_into
        self._place_of_addresses: Any = self.table[kernels.ADDRESS]
        length = sum(-(-size // kernels.LINE_ELEMENTS) * kernels.LINE_ELEMENTS for size in self._sizes)
        self._is_long = length > kernels.SHORT_LINE
        self._num_items = _count_items(length)
        self._group_of: Integers | None = None
        self._limited = False

    @property
    def num_slots(self) -> int:
        """Return the number of slots for results."""
        return self._spare

    @property
    def results(self) -> Floats:
        """Return the measured sums: for each slot a row for every gradient, for every group, and for all."""
        return self._results[: self._spare]

    def _group(self, group_of: Integers, num_groups: int) -> None:
        """Allocate the results for these groups; after an interrupt the next call begins anew."""
        self._group_of, num_grads = None, len(self._sizes)
        self.table[kernels.GROUP, :num_grads] = group_of
        num_rows = num_grads + num_groups + 1
        self._spare = max(1, min(MOST_SLOTS, _SLOT_BYTES // (8 * kernels.COLUMNS * num_rows)))
        self._heads = np.empty((self._num_items, kernels.COLUMNS))
        self._progress = np.zeros(kernels.PROGRESS, np.int64)
        self._results = np.empty((self._spare + 1, num_rows, kernels.COLUMNS))
        of_groups = np.bincount(group_of, self._sizes, num_groups).astype(np.int64)
        self._counts = np.array([*of_groups, sum(self._sizes)], np.int64)
        self._orders = kernels.write_orders(self.table, self._results, self._heads, self._progress, self._counts)
        self._orders[kernels.PHASES] = _ALL_PHASES
        self._place = self._orders.ctypes.data
        self.limit(math.inf, 0.0)
        self._group_of = group_of

    def fits(self, grads: Sequence[torch.Tensor]) -> bool:
        """Tell whether gradients are of the same types and sizes, and as plain as those that it was made for."""
        return (
            list(map(_dtype, grads)) == self._dtypes and list(map(_numel, grads)) == self._sizes and _are_plain(grads)
        )

    def tabulate(self, grads: Sequence[torch.Tensor]) -> Integers:
        """Describe gradients that it fits, as the engine does, until it is asked for those of the next step."""
        self._put_addresses(self._place_of_addresses, 0, *map(_data_ptr, grads))
        return self.table

    def limit(self, norm: float, epsilon: float) -> None:
        """Set the limit to which `look` clips the norm; `epsilon` is added to the norm."""
        self._limited = norm < math.inf
        self._orders.view(np.float64)[[kernels.LIMIT, kernels.EPSILON]] = norm, epsilon

    def look(self, grads: Sequence[torch.Tensor], slot: int, low: float, high: float) -> float:
        """Measure gradients into a slot and clip them in one call; return their norm.

        It is NaN where ln of the norm is not between the bounds or not all can be told from this look: then the
        gradients stay as they are. It is negative where they are others than planned, or this call cannot measure them.
        """
        try:
            if (
                list(map(_dtype, grads)) != self._dtypes
                or list(map(_numel, grads)) != self._sizes
                or not _PLAIN_TYPES.issuperset(map(type, grads))
                or not all(map(_is_cpu, grads))
                or not all(map(_is_contiguous, grads))
            ):
                return -1.0
            addresses = list(map(_data_ptr, grads))
        except (AttributeError, RuntimeError):  # there is none, or a sparse one
            return -1.0
        if self._limited and len(set(addresses)) < len(addresses):  # it would be clipped twice
            return -1.0
        self._put_addresses(self._place_of_addresses, 0, *addresses)
        if self._is_long:
            self._orders[kernels.PHASES] = phases = _gather_team(kernels.MEASURE_IN_TEAM, self._progress)
            if phases == _ALL_PHASES:
                return -1.0
        return kernels.look(self._place, slot, low, high)  # type: ignore[no-any-return]

    def measure(self, grads: Sequence[torch.Tensor], group_of: Integers, num_groups: int) -> Moments | None:
        """Measure gradients in one call; return None where it takes more, or where they are others than planned."""
        if group_of is not self._group_of:
            self._group(group_of, num_groups)
        if self.look(grads, self._spare, math.inf, -math.inf) < 0:
            return None
        num_grads, results = len(grads), self._results[self._spare].copy()
        moments = Moments(
            results[:num_grads],
            results[num_grads:-1],
            results[-1].tolist(),
            one_sided=bool(self._progress[kernels.ONE_SIDED]),
        )
        return moments if SMALLEST_SQUARES < moments.total[SQUARES] < math.inf or not moments.out_of_range() else None

    def scale(self, coefficient: float) -> bool:
        """Multiply the gradients that were measured last in one call; say whether it was done."""
        phases = _gather_team(kernels.SCALE_IN_TEAM, self._progress) if self._is_long else _ALL_PHASES
        if coefficient < SMALLEST_FACTOR or (self._is_long and phases == _ALL_PHASES):
            return False
        return kernels.scale(phases, self.table, self._progress, coefficient) >= 0


@final
class NativeEngine:
    """A measurement of gradients on the CPU: one pass over their memory, on as many threads as torch uses.

    The results do not depend on the number of threads. Two engines, or one, may work in two threads at once.
    """

    name = "native"

    @staticmethod
    def covers(grad: torch.Tensor) -> bool:
        """Tell whether the engine can measure a gradient: plain, real, floating, on the CPU, without gaps."""
        return (
            type(grad) in _PLAIN_TYPES
            and grad.is_cpu
            and grad.layout is torch.strided
            and grad.dtype in _CODES
            and not grad.is_neg()
            and not grad._is_zerotensor()
            and (grad.is_contiguous() or _is_dense(grad))
        )

    @staticmethod
    def covers_all(grads: Sequence[torch.Tensor]) -> bool:
        """Tell whether the engine can measure every one of these gradients, checking only what is likely.

        Negative views and tensors without storage, which autograd does not store in a gradient, pass.
        """
        quick = _CODES.keys() >= set(map(_dtype, grads)) and _are_plain(grads)
        return quick or all(map(NativeEngine.covers, grads))

    def plan(self, grads: Sequence[torch.Tensor], table: Integers) -> Plan:
        """Return a plan for later gradients of the same sizes as those in this table."""
        return Plan(self, grads, table)

    @staticmethod
    def tabulate(grads: Sequence[torch.Tensor]) -> Integers:
        """Describe gradients to the kernels: a column each, and one more where the line ends.

        What it holds are addresses, so it is good for as long as the gradients stay where they are.
        """
        num_grads = len(grads)
        table = np.empty((kernels.NUM_FACTS, num_grads + 1), np.int64)
        table[kernels.ADDRESS, :num_grads] = np.fromiter(map(_data_ptr, grads), np.int64, num_grads)
        table[kernels.SIZE, :num_grads] = np.fromiter(map(_numel, grads), np.int64, num_grads)
        codes = list(map(_CODES.__getitem__, map(_dtype, grads)))
        table[kernels.CODE, :num_grads] = codes
        table[kernels.START, -1] = _UNKNOWN
        return table

    def measure(
        self,
        grads: Sequence[torch.Tensor],
        group_of: Integers,
        num_groups: int,
        *,
        exponent: int = 0,
        table: Integers | None = None,
    ) -> tuple[Floats, Floats, list[float], bool]:
        """Measure gradients that the engine covers: a row per gradient, a row per group, and the total.

        The columns are sum, sum of squares, minimum and maximum of the finite elements (times 2**-exponent),
        and the numbers of zeros, NaN, +Inf and -Inf. Only float64 gradients whose squares overflow or
        underflow need an exponent. The last thing returned is whether the elements of any gradient are all above
        zero or all below.
        """
        num_grads = len(grads)
        table, progress = self.tabulate(grads) if table is None else table, np.zeros(kernels.PROGRESS, np.int64)
        table[kernels.GROUP, :num_grads] = group_of
        results = np.empty((num_grads + num_groups + 1, kernels.COLUMNS))
        length = int(table[kernels.START, -1])
        is_long = length > kernels.SHORT_LINE
        phases = _gather_team(kernels.MEASURE_IN_TEAM, progress) if is_long else _ALL_PHASES
        heads = np.empty((_count_items(length) if is_long else _NUM_SHORT_ITEMS, kernels.COLUMNS))
        factors = _halves(exponent) if exponent else (1.0, 1.0)
        length = kernels.measure(phases, table, results, heads, progress, *factors)
        if length < 0 or (length > kernels.SHORT_LINE and phases == _ALL_PHASES):
            heads = np.empty((_count_items(length), kernels.COLUMNS))
            rest = table, results, heads, progress, *factors
            _work_together(
                lambda phases: kernels.measure(phases, *rest), kernels.MEASURE_IN_TEAM, progress, grads, length
            )
            kernels.measure(kernels.MERGE, *rest)
        one_sided = bool(progress[kernels.ONE_SIDED])
        return results[:num_grads], results[num_grads:-1], results[-1].tolist(), one_sided

    def scale(self, grads: Sequence[torch.Tensor], coefficient: float, *, table: Integers | None = None) -> None:
        """Multiply gradients that the engine covers in place, to the bit as `mul_` does.

        Autograd is not told: the version counters stay, since nothing differentiates through these buffers.
        """
        table, progress = self.tabulate(grads) if table is None else table, np.zeros(kernels.PROGRESS, np.int64)
        is_long = int(table[kernels.START, -1]) > kernels.SHORT_LINE
        phases = _gather_team(kernels.SCALE_IN_TEAM, progress) if is_long else _ALL_PHASES
        length = kernels.scale(phases, table, progress, coefficient)
        if length < 0 or (length > kernels.SHORT_LINE and phases == _ALL_PHASES):
            rest = table, progress, coefficient
            _work_together(lambda phases: kernels.scale(phases, *rest), kernels.SCALE_IN_TEAM, progress, grads, length)


def _are_plain(grads: Sequence[torch.Tensor]) -> bool:
    """Tell whether gradients are dense tensors in the memory of the CPU, in the order of their dimensions."""
    return (
        _PLAIN_TYPES.issuperset(map(type, grads))
        and all(map(_is_cpu, grads))
        and _STRIDED.issuperset(map(_layout, grads))
        and all(map(_is_contiguous, grads))
    )


def _halves(exponent: int) -> tuple[float, float]:
    """Return two factors that divide by 2**exponent together, since one alone may be out of range."""
    return math.ldexp(1.0, -(exponent // 2)), math.ldexp(1.0, exponent // 2 - exponent)


def _count_items(length: int) -> int:
    if length == kernels.OUT_OF_BOUNDS:
        raise IndexError("gradients do not fit into the memory that their results were given")
    if length < 0:
        raise UsageError(
            "A gradient has elements but no memory: expected storage that is allocated. "
            "Measure before the storage is freed."
        )
    return -(-length // kernels.ITEM_ELEMENTS)


def _gather_team(in_team: int, progress: Integers) -> int:
    """Return the phases that one call runs of a line that is known to be long: in a team, which is told its work."""
    num_threads = torch.get_num_threads()
    crew = team() if num_threads > 1 else None
    if crew is None:
        return _ALL_PHASES
    progress[kernels.CREW] = *crew, in_team, num_threads
    return _ALL_IN_TEAM


def _work_together(
    work: Callable[[int], object], in_team: int, progress: Integers, grads: Sequence[torch.Tensor], length: int
) -> None:
    """Run the work on as many threads as torch would use, until every item of the line is done."""
    num_threads, num_items = torch.get_num_threads(), _count_items(length)
    crew = team() if num_threads > 1 else None
    if crew is not None:
        progress[kernels.CREW] = *crew, in_team, num_threads
        work(kernels.TEAM_WORK)
        return

    def share(_alive: object = grads) -> None:  # an interrupt may end this call before a helper is through
        work(kernels.WORK)

    finished = helpers().lend(share, min(num_threads, num_items) - 1 if length > kernels.CACHED_LINE else 0)
    work(kernels.WORK | kernels.WAIT)
    while progress[kernels.DONE] < num_items:
        next(finished)


def _is_dense(grad: torch.Tensor) -> bool:
    """Tell whether the elements fill a stretch of memory once each, in whatever order of dimensions."""
    step = 1
    for stride, size in sorted(pair for pair in zip(grad.stride(), grad.shape, strict=True) if pair[1] != 1):
        if stride != step:
            return False
        step *= size
    return True
