"""Sizes of matrices that are not norms: effective ranks, conditioning and the spectral radius."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

KRYLOV: Final = 80
"""So many vectors find the radius of a random matrix of some hundreds of dimensions to 1e-3 and better."""


def effective_rank(singular_values: Tensor) -> float:
    """Return exp of the entropy of the singular values' shares (Roy and Vetterli 2007); 0 for a zero matrix."""
    total = float(singular_values.sum())
    if not total > 0:
        return 0.0
    shares = (singular_values.double() / total).clamp_min(0.0)
    return math.exp(float(torch.special.entr(shares).sum()))


def participation_ratio(singular_values: Tensor) -> float:
    """Return the squared sum over the sum of squares of the squared singular values; 0 for a zero matrix."""
    squares = singular_values.double() ** 2
    total = float((squares**2).sum())
    return float(squares.sum()) ** 2 / total if total > 0 else 0.0


def stable_rank(singular_values: Tensor) -> float:
    """Return the squared Frobenius norm over the squared largest singular value; 0 for a zero matrix."""
    largest = float(singular_values.max()) if singular_values.numel() else 0.0
    return float((singular_values.double() ** 2).sum()) / largest**2 if largest > 0 else 0.0


def condition_number(singular_values: Tensor) -> float:
    """Return the largest over the smallest singular value; infinite for a singular matrix."""
    if not singular_values.numel():
        return math.nan
    smallest, largest = float(singular_values.min()), float(singular_values.max())
    return largest / smallest if smallest > 0 else math.inf


def spectral_radius(matrix: Tensor) -> float:
    """Return the largest magnitude of an eigenvalue of a square matrix."""
    return float(torch.linalg.eigvals(matrix).abs().max()) if matrix.numel() else 0.0


def arnoldi_radius(matvec: Callable[[Tensor], Tensor], start: Tensor, *, num_vectors: int = KRYLOV) -> float:
    """Return the largest magnitude of an eigenvalue by Arnoldi's method with every vector orthogonalised twice.

    Unlike the Rayleigh quotient of power iteration this is right for complex pairs and for matrices far from normal.
    """
    count = min(num_vectors, start.numel())
    basis = start.new_zeros(count, start.numel())
    basis[0] = start / start.norm()
    hessenberg = start.new_zeros(count, count)
    for column in range(count):
        image = matvec(basis[column])
        scale = float(image.norm())
        for _ in range(2):
            shares = basis[: column + 1] @ image
            image = image - shares @ basis[: column + 1]
            hessenberg[: column + 1, column] += shares
        left = float(image.norm())
        if column + 1 == count or left <= 1e3 * torch.finfo(start.dtype).eps * scale:
            return spectral_radius(hessenberg[: column + 1, : column + 1])
        hessenberg[column + 1, column] = left
        basis[column + 1] = image / left
    return 0.0
