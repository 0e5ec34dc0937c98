"""Derivatives as linear maps: products of vectors with a Jacobian and its transpose, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradtrack.analyzers.tools.samples import Pending
from gradtrack.analyzers.tools.spectra import column_of, norm
from gradtrack.errors import UsageError
from gradtrack.support.interrupts import Changes

_CHUNK: Final = 64
_ITERATIONS: Final = 24


class LinearMap:
    """The Jacobian J of a function at a point, as products of vectors with it.

    The function runs once, so that a random one is the same for every product. J u comes from differentiating Jᵀv by v,
    which needs no forward-mode rule of any operation. Products of a function in half precision come in float32.
    """

    def __init__(self, outputs: Tensor, inputs: Sequence[Tensor]) -> None:
        self._inputs = list(inputs)
        self._outputs = outputs.reshape(-1)
        self.num_inputs = sum(tensor.numel() for tensor in self._inputs)
        self.num_outputs = self._outputs.numel()
        self._cotangent: Tensor | None = None
        self._pulled: Tensor | None = None

    @classmethod
    def of(cls, function: Callable[[Tensor], Tensor], at: Tensor) -> LinearMap:
        """Linearise a function of one tensor at a point."""
        with torch.enable_grad():
            point = at.detach().clone().requires_grad_()
            return cls(function(point.clone()), [point])

    def pull(self, vector: Tensor) -> Tensor:
        """Return Jᵀv."""
        return _precise(self._grad(self._outputs, self._inputs, vector.to(self._outputs)))

    def push(self, vector: Tensor) -> Tensor:
        """Return J u."""
        pulled, cotangent = self._transposed()
        return _precise(self._grad(pulled, [cotangent], vector.to(pulled)))

    def pulls(self, vectors: Tensor) -> Tensor:
        """Return Jᵀv for every row v."""
        return self._grads(self._outputs, self._inputs, vectors)

    def pushes(self, vectors: Tensor) -> Tensor:
        """Return J u for every row u."""
        pulled, cotangent = self._transposed()
        return self._grads(pulled, [cotangent], vectors)

    def matrix(self) -> Tensor:
        """Return J, by rows or by columns, whichever are fewer."""
        if self.num_outputs <= self.num_inputs:
            return self.pulls(self._eye(self.num_outputs))
        return self.pushes(self._eye(self.num_inputs)).T

    def random(self, size: int, generator: torch.Generator, *, signs: bool = False) -> Tensor:
        """Draw a vector of independent normal numbers or signs, with the same numbers on every device."""
        if signs:
            drawn = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
        else:
            drawn = torch.randn(size, generator=generator, dtype=torch.float64)
        return _precise(drawn.to(self._outputs, non_blocking=True))

    def _transposed(self) -> tuple[Tensor, Tensor]:
        if self._pulled is None or self._cotangent is None:
            self._cotangent = torch.zeros_like(self._outputs, requires_grad=True)
            with torch.enable_grad():
                self._pulled = self._grad(self._outputs, self._inputs, self._cotangent, create_graph=True)
        return self._pulled, self._cotangent

    def _eye(self, size: int) -> Tensor:
        return torch.eye(size, dtype=self._outputs.dtype, device=self._outputs.device)

    @staticmethod
    def _grad(outputs: Tensor, inputs: list[Tensor], vector: Tensor, *, create_graph: bool = False) -> Tensor:
        if not outputs.requires_grad:
            return torch.cat([torch.zeros_like(tensor).reshape(-1) for tensor in inputs])
        found = torch.autograd.grad(
            outputs, inputs, vector, retain_graph=True, create_graph=create_graph, materialize_grads=True
        )
        return torch.cat([part.reshape(-1) for part in found])

    def _grads(self, outputs: Tensor, inputs: list[Tensor], vectors: Tensor) -> Tensor:
        parts = torch.split(vectors.to(outputs), _CHUNK)
        return _precise(torch.cat([self._batch(outputs, inputs, part) for part in parts]))

    def _batch(self, outputs: Tensor, inputs: list[Tensor], vectors: Tensor) -> Tensor:
        """Differentiate for several vectors at once; one by one where an operation has no rule for that."""
        if outputs.requires_grad and len(vectors) > 1:
            try:
                found = torch.autograd.grad(
                    outputs, inputs, vectors, retain_graph=True, is_grads_batched=True, materialize_grads=True
                )
                return torch.cat([part.reshape(len(vectors), -1) for part in found], dim=1)
            except RuntimeError:  # also what has no rule at all
                pass
        return torch.stack([self._grad(outputs, inputs, vector) for vector in vectors])


@contextmanager
def differentiable_twice(module: nn.Module | None = None) -> Iterator[None]:
    """Choose kernels that can be differentiated twice, which fused attention and fused recurrent layers cannot."""
    with ExitStack() as stack, Changes() as changes:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if module is None or any(isinstance(part, nn.RNNBase) for part in module.modules()):
            flags = torch.backends.mkldnn
            changes.note(partial(flags.set_flags, flags.enabled, None, None, None))
            flags.set_flags(False, None, None, None)  # type: ignore[no-untyped-call]
            if torch.cuda.is_available():
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def largest_singular_value(linear: LinearMap, generator: torch.Generator) -> Pending[float]:
    """Find the largest singular value, by Golub-Kahan bidiagonalisation with every vector orthogonalised twice.

    Each iteration is one product with J and one with its transpose, as in power iteration, but the largest value of the
    bidiagonal matrix converges much faster. Where nothing is left of a vector the CPU stops; an accelerator goes on, so
    that the processor need not wait, and what came after is left out.
    """
    right = [_unit(linear.random(linear.num_inputs, generator))]
    left: list[Tensor] = []
    diagonal: list[float | Tensor] = []
    above: list[float | Tensor] = []
    for step in range(min(_ITERATIONS, linear.num_inputs, linear.num_outputs)):
        image = _orthogonal(linear.push(right[step]), left)
        diagonal.append(norm(image))
        if image.is_cpu and not diagonal[-1] > 0:
            break
        left.append(_unit(image))
        image = _orthogonal(linear.pull(left[step]), right)
        above.append(norm(image))
        if image.is_cpu and _is_spent(above[-1], diagonal):
            break
        right.append(_unit(image))
    return Pending([column_of(diagonal), column_of(above)], _largest_of_bidiagonal)


def _is_spent(last: Any, diagonal: Sequence[Any]) -> bool:
    return bool(last <= 1e-12 * max(diagonal))


def _largest_of_bidiagonal(diagonal: Tensor, above: Tensor) -> float:
    """Return the largest singular value from the iterations up to the one that left nothing."""
    sizes, others = diagonal.tolist(), above.tolist()
    count = next(
        (step + 1 for step, size in enumerate(sizes) if not size > 0 or _is_spent(others[step], sizes[: step + 1])),
        len(sizes),
    )
    matrix = torch.diag(diagonal[:count]) + torch.diag(above[: count - 1], 1)
    return float(torch.linalg.svdvals(matrix)[0]) if torch.isfinite(matrix).all() else math.nan


def squared_frobenius(
    linear: LinearMap, generator: torch.Generator, *, num_probes: int
) -> Pending[tuple[float, float]]:
    """Find the mean of ‖Jᵀv‖² over random signs v, which is ‖J‖², and its standard error."""
    probes = torch.stack([linear.random(linear.num_outputs, generator, signs=True) for _ in range(num_probes)])

    def finish(found: Tensor) -> tuple[float, float]:
        error = float(found.std()) / math.sqrt(num_probes) if num_probes > 1 else math.nan
        return float(found.mean()), error

    return Pending([linear.pulls(probes).double().square().sum(dim=1)], finish)


def leading_singular_values(linear: LinearMap, generator: torch.Generator, *, count: int) -> Pending[Tensor]:
    """Find about `count` of the largest singular values, by a randomised range finder (Halko et al. 2011)."""
    size = min(count, linear.num_inputs, linear.num_outputs)
    sketch = torch.stack([linear.random(linear.num_inputs, generator) for _ in range(size)])
    basis = torch.linalg.qr(linear.pushes(sketch).double().T)[0]
    return Pending([condensed(linear.pulls(basis.T.to(sketch)).double())], torch.linalg.svdvals)


def condensed(matrix: Tensor) -> Tensor:
    """Return a smaller matrix with the same singular values where it has to be copied, NaN for what is not finite.

    An accelerator would have to be waited for by its singular values.
    """
    if matrix.is_cpu or matrix.shape[0] == matrix.shape[1]:
        return matrix
    triangle = torch.linalg.qr(matrix if matrix.shape[0] > matrix.shape[1] else matrix.T, mode="r")[1]
    return torch.where(matrix.isfinite().all(), triangle, math.nan)


def check_differentiable(value: Tensor, what: str) -> None:
    """Refuse a value that was computed without a graph."""
    if not value.requires_grad:
        raise UsageError(
            f"{what} does not depend on its parameters through autograd: expected a differentiable one. "
            "Compute gradients in it with torch.func.grad, or with create_graph=True."
        )


def _precise(values: Tensor) -> Tensor:
    """Return values in which vectors can be kept orthogonal."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _orthogonal(vector: Tensor, basis: Sequence[Tensor]) -> Tensor:
    if basis:
        rows = torch.stack(list(basis))
        for _ in range(2):
            vector = vector - (rows @ vector) @ rows
    return vector


def _unit(vector: Tensor) -> Tensor:
    return vector / norm(vector)
