"""The engine that measures with torch operations, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.measure import torch_cpu, torch_device
from gradtrack.measure.moments import SQUARES, Rows, merge


class TorchEngine:
    """Measures on the CPU in pieces that stay in the cache, and elsewhere with one read at the end."""

    name = "torch"

    def measure(
        self, grads: Sequence[Tensor], group_of: NDArray[np.int64], num_groups: int, *, exponent: int = 0
    ) -> tuple[Rows, Rows, list[float]]:
        """Return the rows of the tensors, of the groups and of everything."""
        rows = np.zeros((len(grads), 8))
        here = [index for index, grad in enumerate(grads) if grad.is_cpu]
        rows[here] = torch_cpu.measure([grads[index] for index in here], exponent)
        for device in dict.fromkeys(grad.device for grad in grads if not grad.is_cpu):
            there = [index for index, grad in enumerate(grads) if grad.device == device]
            rows[there] = self._read([grads[index] for index in there], exponent)
        return rows, *merge(rows, group_of, num_groups)

    def scale(self, grads: Sequence[Tensor], coefficient: float | Tensor) -> None:
        """Multiply every tensor in place."""
        if grads:
            torch._foreach_mul_(list(grads), coefficient)

    def _read(self, grads: Sequence[Tensor], exponent: int) -> Rows:
        """Measure tensors of one device, and those with non-finite elements a second time."""
        if exponent:
            grads = [grad * 2.0 ** (-exponent // 2) * 2.0 ** (-exponent - -exponent // 2) for grad in grads]
        rows: Rows = torch_device.measure(grads, exact=False).cpu().double().numpy()
        bad = [int(index) for index in np.flatnonzero(~np.isfinite(rows[:, : SQUARES + 1]).all(axis=1))]
        if bad:
            rows[bad] = torch_device.measure([grads[index] for index in bad], exact=True).cpu().double().numpy()
        return rows
