"""The divergence and the rotation of a vector field, from products with its Jacobian."""

from __future__ import annotations

import math
from typing import Final

import torch

from gradtrack.measure.linear_maps import LinearMap

_EXACT_LIMIT: Final = 64


class FieldSamples:
    """Estimates of tr J and of the squared norms of the antisymmetric and symmetric parts of J, one per probe.

    A field of up to 64 dimensions gives its exact numbers, one sample per point; a larger one is probed with random
    signs w: wᵀJw for the trace (Hutchinson), ‖(J ∓ Jᵀ)w‖²/4 for the parts.
    """

    def __init__(self, generator: torch.Generator, num_probes: int, *, exact_limit: int = _EXACT_LIMIT) -> None:
        self.exact = False
        self._generator, self._num_probes, self._exact_limit = generator, num_probes, exact_limit
        self._traces: list[float] = []
        self._antisymmetric: list[float] = []
        self._symmetric: list[float] = []

    def add(self, linear: LinearMap, *, symmetric: bool = False) -> None:
        """Take in the field around one point; a symmetric Jacobian needs half of the products."""
        self.exact = linear.num_inputs <= self._exact_limit
        if self.exact:
            self._add_exact(linear, symmetric=symmetric)
            return
        for _ in range(self._num_probes):
            probe = linear.random(linear.num_inputs, self._generator, signs=True)
            pulled = linear.pull(probe).double()
            self._traces.append(float(probe.double() @ pulled))
            if not symmetric:
                pushed = linear.push(probe).double()
                self._antisymmetric.append(float((pushed - pulled).square().sum()) / 4)
                self._symmetric.append(float((pushed + pulled).square().sum()) / 4)

    @property
    def num_probes(self) -> int:
        """Return the number of probes so far, or of points with exact numbers."""
        return len(self._traces)

    @property
    def divergence(self) -> float | None:
        """Return the mean of tr J."""
        return _mean(self._traces)

    @property
    def divergence_error(self) -> float | None:
        """Return the standard error of the divergence: zero where it is exact."""
        if self.exact and len(self._traces) == 1:
            return 0.0
        return _error(self._traces)

    @property
    def antisymmetric_norm(self) -> float | None:
        """Return ‖(J - Jᵀ)/2‖."""
        return _root(_mean(self._antisymmetric))

    @property
    def symmetric_norm(self) -> float | None:
        """Return ‖(J + Jᵀ)/2‖."""
        return _root(_mean(self._symmetric))

    @property
    def rotation(self) -> float | None:
        """Return κ = ‖A‖²/(‖A‖² + ‖S‖²), from 0 for a gradient to 1 for pure rotation; None for a constant field."""
        return _share(self._antisymmetric, self._symmetric)

    @property
    def rotation_error(self) -> float | None:
        """Return the standard error of the rotation, by leaving out one probe after the other."""
        count = len(self._antisymmetric)
        if count == 1 and self.exact:
            return 0.0
        without = [
            _share(
                self._antisymmetric[:i] + self._antisymmetric[i + 1 :], self._symmetric[:i] + self._symmetric[i + 1 :]
            )
            for i in range(count)
        ]
        known = [value for value in without if value is not None]
        if len(known) < 2:
            return None
        mean = sum(known) / len(known)
        return math.sqrt((len(known) - 1) / len(known) * sum((value - mean) ** 2 for value in known))

    def _add_exact(self, linear: LinearMap, *, symmetric: bool) -> None:
        matrix = linear.matrix().double()
        self._traces.append(float(matrix.trace()))
        if not symmetric:
            self._antisymmetric.append(float(((matrix - matrix.T) / 2).square().sum()))
            self._symmetric.append(float(((matrix + matrix.T) / 2).square().sum()))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _error(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _root(value: float | None) -> float | None:
    return None if value is None else math.sqrt(value)


def _share(antisymmetric: list[float], symmetric: list[float]) -> float | None:
    turning, both = sum(antisymmetric), sum(antisymmetric) + sum(symmetric)
    return turning / both if both > 0 else None
