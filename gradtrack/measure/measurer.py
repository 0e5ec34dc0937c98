"""The choice of an engine, and the one pass over the gradients that it makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.errors import MissingExtraError
from gradtrack.measure.moments import MAX, MIN, WIDTH, Moments, merge
from gradtrack.measure.torch_engine import TorchEngine

EngineName = Literal["auto", "torch", "native"]


class Measurer:
    """Measures gradients in one pass: with the native engine what it covers, with torch the rest."""

    def __init__(self, engine: EngineName = "auto") -> None:
        self.engine = engine
        self._torch = TorchEngine()
        self._native: Any = None if engine == "torch" else _native(required=engine == "native")

    def measure(self, grads: Sequence[Tensor], group_of: NDArray[np.int64], num_groups: int) -> Moments:
        """Return the sums of the gradients; measured again, rescaled, where squares leave the float64 range."""
        moments = Moments(*self._once(grads, group_of, num_groups, 0))
        if moments.out_of_range():
            low, high = moments.total[MIN], moments.total[MAX]
            exponent = math.frexp(max(abs(low), abs(high)))[1]
            moments = Moments(*self._once(grads, group_of, num_groups, exponent), exponent)
        return moments

    def scale(self, grads: Sequence[Tensor], coefficient: float) -> None:
        """Multiply every gradient in place."""
        native, others = self._split(grads)
        if native:
            self._native.scale([grads[index] for index in native], coefficient)
        self._torch.scale([grads[index] for index in others], coefficient)

    def _once(
        self, grads: Sequence[Tensor], group_of: NDArray[np.int64], num_groups: int, exponent: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], list[float]]:
        native, others = self._split(grads)
        if not others and native:
            return self._native.measure(grads, group_of, num_groups, exponent=exponent)  # type: ignore[no-any-return]
        if not native:
            return self._torch.measure(grads, group_of, num_groups, exponent=exponent)
        rows = np.empty((len(grads), WIDTH))
        for engine, indices in ((self._native, native), (self._torch, others)):
            part = [grads[index] for index in indices]
            rows[indices] = engine.measure(part, group_of[indices], num_groups, exponent=exponent)[0]
        return rows, *merge(rows, group_of, num_groups)

    def _split(self, grads: Sequence[Tensor]) -> tuple[Sequence[int], Sequence[int]]:
        if self._native is None:
            return (), range(len(grads))
        if self._native.covers_all(grads):
            return range(len(grads)), ()
        covered = [self._native.covers(grad) for grad in grads]
        return (
            [index for index, fits in enumerate(covered) if fits],
            [index for index, fits in enumerate(covered) if not fits],
        )


def _native(*, required: bool) -> object:
    try:
        from gradtrack.measure.native import NativeEngine
    except ImportError as fault:
        if required:
            raise MissingExtraError(
                "engine 'native': expected the package numba. Run: pip install \"gradtrack[native]\""
            ) from fault
        return None
    return NativeEngine()
