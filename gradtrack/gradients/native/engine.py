"""The native engine: measures and scales gradients in the memory of the CPU with compiled loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from struct import Struct
from typing import Any, TypeAlias, final

import numpy as np
import torch

from gradtrack.errors import UsageError
from gradtrack.gradients.moments import Moments
from gradtrack.gradients.native import kernels
from gradtrack.gradients.native.threads import team
from gradtrack.gradients.torch_cpu import PLAIN_TYPES, is_plain

_CODES = {
    torch.float32: kernels.FLOAT32,
    torch.float64: kernels.FLOAT64,
    torch.bfloat16: kernels.BFLOAT16,
    torch.float16: kernels.FLOAT16,
}
_dtype = attrgetter("dtype")
_is_cpu = attrgetter("is_cpu")
_is_contiguous, _numel, _data_ptr = torch.Tensor.is_contiguous, torch.Tensor.numel, torch.Tensor.data_ptr
MOST_SLOTS = 16
_SLOT_BYTES = 1 << 18
"""How many calls of `look` a plan has slots for, and how many bytes their results may take."""
Integers: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Floats: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@final
class Plan:
    """A plan to measure and scale gradients on as many threads as torch uses: all that the kernels are told.

    It is made for gradients that the engine covers, and `take` points it at those of a later step, which the caller has
    to keep alive. It holds results, so it serves one thread at a time; they do not depend on the number of threads.
    """

    def __init__(self, grads: Sequence[torch.Tensor]) -> None:
        self._dtypes, self._sizes, num_grads = list(map(_dtype, grads)), list(map(_numel, grads)), len(grads)
        self._table = np.empty((kernels.NUM_FACTS, num_grads + 1), np.int64)
        self._table[kernels.SIZE, :num_grads] = self._sizes
        self._table[kernels.CODE, :num_grads] = list(map(_CODES.__getitem__, self._dtypes))
        whole_lines = [-(-size // kernels.LINE_ELEMENTS) * kernels.LINE_ELEMENTS for size in self._sizes]
        self._table[kernels.START] = np.cumsum([0, *whole_lines])
        self._put_addresses: Any = Struct(f"{num_grads}q").pack_into
        self._place_of_addresses: Any = self._table[kernels.ADDRESS]
        self._put_addresses(self._place_of_addresses, 0, *map(_data_ptr, grads))
        length = sum(whole_lines)
        self._is_long = length > kernels.SHORT_LINE
        self._heads = np.empty((-(-length // kernels.ITEM_ELEMENTS), kernels.COLUMNS))
        self._orders = np.zeros(kernels.NUM_ORDERS, np.int64)
        self._place, self._limits = self._orders.ctypes.data, self._orders.view(np.float64)
        self._orders[[kernels.TABLE, kernels.NUM_COLUMNS]] = self._table.ctypes.data, num_grads + 1
        self._orders[[kernels.HEADS, kernels.NUM_HEADS]] = self._heads.ctypes.data, len(self._heads)
        self._orders[[kernels.SEATS, kernels.WORK]] = 1, kernels.WORK_IN_TEAM
        self._group_of: Integers | None = None
        self.limit(math.inf, 0.0)

    @property
    def results(self) -> Floats:
        """Return the measured sums: for each slot a row for every gradient, for every group, and for all."""
        return self._results[:-1]

    def take(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Point the plan at the gradients of a step; say whether they are plain, with the planned types and sizes."""
        try:
            if (
                list(map(_dtype, grads)) != self._dtypes
                or list(map(_numel, grads)) != self._sizes  # type: ignore[arg-type]
                or not PLAIN_TYPES.issuperset(map(type, grads))
                or not all(map(_is_cpu, grads))
                or not all(map(_is_contiguous, grads))  # type: ignore[arg-type]
            ):
                return False
            self._addresses = list(map(_data_ptr, grads))  # type: ignore[arg-type]
        except (AttributeError, RuntimeError):  # there is none, or a sparse one
            return False
        self._put_addresses(self._place_of_addresses, 0, *self._addresses)
        return True

    def limit(self, norm: float, epsilon: float) -> None:
        """Set the limit to which `look` clips the norm; `epsilon` is added to the norm."""
        self._limited = norm < math.inf
        self._limits[kernels.LIMIT], self._limits[kernels.EPSILON] = norm, epsilon

    def look(self, grads: Sequence[torch.Tensor | None], slot: int, low: float, high: float) -> float:
        """Measure gradients into a slot and clip them in one call; return their norm.

        It is NaN where ln of the norm is not between the bounds or not all can be told from this look: then the
        gradients stay as they are. It is negative where they are others than planned, or this call cannot measure them.
        """
        if not self.take(grads):
            return -1.0
        if self._limited and len(set(self._addresses)) < len(grads):  # it would be clipped twice
            return -1.0
        if self._is_long:
            self._gather_team()
        return kernels.look(self._place, slot, low, high, 0)  # type: ignore[no-any-return]

    def measure(self, group_of: Integers, num_groups: int, *, exponent: int = 0) -> Moments:
        """Return the sums of the gradients that the plan points at, divided by 2**exponent."""
        if group_of is not self._group_of:
            self._group(group_of, num_groups)
        if self._is_long:
            self._gather_team()
        spare = len(self._results) - 1
        if kernels.look(self._place, spare, math.inf, -math.inf, exponent) == kernels.NO_MEMORY:
            raise UsageError(
                "A gradient has elements but no memory: expected storage that is allocated. "
                "Measure before the storage is freed."
            )
        num_grads, results = len(self._sizes), self._results[spare].copy()
        return Moments(
            results[:num_grads],
            results[num_grads:-1],
            results[-1].tolist(),
            exponent,
            may_hide=bool(self._orders[kernels.HIDES]),
        )

    def scale(self, coefficient: float) -> None:
        """Multiply the gradients that the plan points at in place, to the bit as `mul_` does.

        Autograd is not told: the version counters stay, since nothing differentiates through these buffers.
        """
        if self._is_long:
            self._gather_team()
        kernels.scale(self._place, coefficient)

    def _group(self, group_of: Integers, num_groups: int) -> None:
        """Allocate the results for these groups; after an interrupt the next call begins anew."""
        self._group_of, num_grads = None, len(self._sizes)
        if num_grads and not 0 <= np.min(group_of) <= np.max(group_of) < num_groups:
            raise IndexError("gradients do not fit into the memory that their results were given")
        self._table[kernels.GROUP, :num_grads] = group_of
        num_rows = num_grads + num_groups + 1
        num_slots = max(1, min(MOST_SLOTS, _SLOT_BYTES // (8 * kernels.COLUMNS * num_rows))) + 1
        self._results = np.empty((num_slots, num_rows, kernels.COLUMNS))
        of_groups = np.bincount(group_of, self._sizes, num_groups).astype(np.int64)
        self._counts = np.array([*of_groups, sum(self._sizes)], np.int64)
        self._orders[kernels.RESULTS : kernels.HEADS] = self._results.ctypes.data, num_rows, num_slots
        self._orders[kernels.COUNTS] = self._counts.ctypes.data
        self._group_of = group_of

    def _gather_team(self) -> None:
        """Order torch's own threads for a line that is long, where torch has a team."""
        num_threads = torch.get_num_threads()
        crew = team() if num_threads > 1 else None
        self._orders[kernels.TEAM : kernels.WORK] = (0, 0, 1) if crew is None else (*crew, num_threads)


@final
class NativeEngine:
    """The engine for gradients in the memory of the CPU: says which of them it covers, and plans their measurement."""

    plan = Plan

    @staticmethod
    def covers(grad: torch.Tensor) -> bool:
        """Tell whether the engine can measure a gradient: plain, real, floating, on the CPU, without gaps."""
        return grad.is_cpu and is_plain(grad, _CODES)
