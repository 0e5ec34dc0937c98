"""Eigenvalues and singular values of matrices and linear maps, and the coherence of successive gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from gradtrack.analyzers.tools.samples import Pending, as_real, read_together
from gradtrack.support.statistics import cosine, mean

KRYLOV: Final = 80
"""So many vectors find the radius of a random matrix of some hundreds of dimensions to 1e-3 and better."""
_RESIDUAL: Final = 1e-2


def effective_rank(singular_values: Tensor) -> float:
    """Return exp of the entropy of the singular values' shares (Roy and Vetterli 2007); 0 for a zero matrix."""
    relative = _relative(singular_values)
    total = float(relative.sum())
    if total == 0:
        return 0.0
    shares = (relative / total).clamp_min(0.0)
    return math.exp(float(torch.special.entr(shares).sum()))


def centred(rows: Tensor) -> Tensor:
    """Return rows (rows, columns) less their mean; what rounding leaves of a column that is constant is zero."""
    left = rows - rows.mean(dim=0)
    rounding = len(rows) * torch.finfo(rows.dtype).eps * rows.abs().amax(dim=0) if len(rows) else left
    return left.masked_fill(left.abs() <= rounding, 0.0)


def participation_ratio(singular_values: Tensor) -> float:
    """Return the squared sum over the sum of squares of the squared singular values; 0 for a zero matrix."""
    squares = _relative(singular_values).square()
    total = float(squares.square().sum())
    return float(squares.sum()) ** 2 / total if total != 0 else 0.0


def condition_number(singular_values: Tensor) -> float:
    """Return the largest over the smallest singular value; infinite for a singular matrix."""
    if not singular_values.numel():
        return math.nan
    smallest, largest = float(singular_values.min()), float(singular_values.max())
    return largest / smallest if smallest > 0 else math.inf


def spectral_radius(matrix: Tensor) -> float:
    """Return the largest magnitude of an eigenvalue of a square matrix."""
    return float(torch.linalg.eigvals(matrix).abs().max()) if matrix.numel() else 0.0


def arnoldi(matvec: Callable[[Tensor], Tensor], start: Tensor, *, num_vectors: int = KRYLOV) -> Pending[Tensor]:
    """Find the outermost eigenvalues by Arnoldi's method with every vector orthogonalised twice, the largest first.

    Unlike the Rayleigh quotient of power iteration this is right for complex pairs and for matrices far from normal.
    Of the eigenvalues of the small matrix those are kept whose residual is under a hundredth of the largest, and the
    largest in any case. Where nothing is left of a vector the CPU stops; an accelerator goes on, so that the processor
    need not wait, and what came after is left out.
    """
    count = min(num_vectors, start.numel())
    basis = start.new_zeros(count, start.numel())
    basis[0] = start / norm(start)
    above = start.new_zeros(count, count)
    lengths: list[float | Tensor] = []
    scales: list[float | Tensor] = []
    smallest = 1e3 * torch.finfo(start.dtype).eps
    for column in range(count):
        image, known = matvec(basis[column]), basis[: column + 1]
        shares = above[column, : column + 1]
        scales.append(norm(image))
        for _ in range(2):
            share = known @ image
            image = image - share @ known
            shares += share
        lengths.append(norm(image))
        if column + 1 == count or (start.is_cpu and lengths[-1] <= smallest * scales[-1]):
            break
        basis[column + 1] = image / lengths[-1]

    def finish(above: Tensor, left: Tensor, sizes: Tensor) -> Tensor:
        ends = (left <= smallest * sizes).nonzero()[:, 0].tolist()
        last = min([*ends, len(left) - 1])
        small = above[: last + 1, : last + 1].double().T
        return _outermost(small + torch.diag(left[:last], -1), float(left[last]))

    return Pending([above, column_of(lengths), column_of(scales)], finish)


def _relative(singular_values: Tensor) -> Tensor:
    """Return singular values over the largest of them, whose squares are in range; zeros of a zero matrix.

    They are NaN where one of them is not finite.
    """
    values = singular_values.double()
    largest = float(values.max()) if values.numel() else 0.0
    return values / largest if largest != 0 else torch.zeros_like(values)


def _outermost(hessenberg: Tensor, left: float) -> Tensor:
    """Return the eigenvalues of Arnoldi's small matrix that are nearly those of the large one, the largest first."""
    if not bool(hessenberg.isfinite().all()):
        return torch.full((1,), math.nan, dtype=torch.complex128)
    values, vectors = torch.linalg.eig(hessenberg)
    sizes = values.abs()
    residuals = left * vectors[-1].abs() / torch.linalg.vector_norm(vectors, dim=0)
    largest = float(sizes.max())
    kept: Tensor = values[(residuals <= _RESIDUAL * largest) | (sizes >= (1 - 1e-9) * largest)]
    ordered: Tensor = kept[kept.abs().argsort(descending=True)]
    return ordered


def norm(vector: Tensor) -> float | Tensor:
    """Return the norm of a vector whose squares may leave the range of its precision; a tensor off the CPU."""
    found = torch.linalg.vector_norm(vector, dtype=torch.float64)
    return float(found) if found.is_cpu else found


def column_of(numbers: Sequence[float | Tensor]) -> Tensor:
    """Return norms as one tensor, where they are."""
    there = [number for number in numbers if isinstance(number, Tensor)]
    return torch.stack(there) if there else torch.tensor(numbers, dtype=torch.float64)


class GradientCoherence:
    """The mean cosine between the gradients of consecutive steps; it keeps one copy of the gradients."""

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        self._cosines: list[float] = []

    def add(self, model: nn.Module) -> None:
        """Add the present gradients of a model."""
        now = {name: param.grad.detach().clone() for name, param in model.named_parameters() if param.grad is not None}
        if self._before:
            self._cosines.append(gradient_cosine(self._before, now))
        self._before = now

    def mean(self) -> float | None:
        """Return the mean over the steps so far, or None before the second."""
        return mean(value for value in self._cosines if not math.isnan(value))


def gradient_cosine(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> float:
    """Return the cosine between the gradients, by name, of two steps; NaN where they share none that is dense."""
    pairs = [(before[name], now[name]) for name in now if name in before]
    dense = [
        (one, other) for one, other in pairs if one.shape == other.shape and not (one.is_sparse or other.is_sparse)
    ]
    if not dense:
        return math.nan
    products = [_products(one, other) for one, other in dense]
    return cosine(*torch.stack(read_together(products)).sum(0).tolist())


def _products(before: Tensor, now: Tensor) -> Tensor:
    first, second = as_real(before).double().flatten(), as_real(now).double().flatten()
    return torch.stack([first @ second, first @ first, second @ second])
