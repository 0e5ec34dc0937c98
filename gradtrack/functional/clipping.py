"""Clipping by the global norm that returns new gradients and leaves the given ones alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from gradtrack.errors import InputTypeError, UsageError
from gradtrack.functional.arrays import BLOCK_ELEMENTS, Leaf, is_tensor, rebuild
from gradtrack.functional.statistics import compute_gradient_norm

if TYPE_CHECKING:
    import torch

Gradients = TypeVar("Gradients")


def clip_gradients(gradients: Gradients, max_norm: float) -> tuple[Gradients, float]:
    """Return the gradients clipped to a global norm of at most `max_norm`, and the norm they had.

    Above the limit every element is multiplied by the one factor `max_norm / norm`; otherwise all stay as
    they are. The result is always a copy in the same containers, dtypes and devices, detached from any graph;
    None stays None. Only integers become float64, as they hold no fractions, and an iterator becomes a list.

    A norm that is NaN or infinite has no factor that helps: then the copies are unchanged, and the returned
    norm says so. Test it with `math.isfinite` before the update.

    >>> clip_gradients({"weight": 3.0, "bias": 4.0}, max_norm=1.0)
    ({'weight': 0.6, 'bias': 0.8}, 5.0)
    """
    limit = _checked_limit(max_norm)
    source: object = list(gradients) if isinstance(gradients, Iterator) else gradients
    norm = compute_gradient_norm(source)
    too_long = math.isfinite(norm) and norm > limit

    def change(flat: Leaf) -> None:
        if too_long:
            _scale_in_place(flat, norm, limit)

    return cast("Gradients", rebuild(source, change)), norm


def _checked_limit(max_norm: float) -> float:
    try:
        limit = float(max_norm)
    except (TypeError, ValueError) as error:
        message = f"max_norm={max_norm!r}: expected a number. Pass the largest norm to allow, such as 1.0."
        raise InputTypeError(message) from error
    if not limit >= 0.0:
        message = f"max_norm={limit}: expected a number of at least 0. Pass the largest norm to allow."
        raise UsageError(message)
    return limit


def _scale_in_place(flat: Leaf, norm: float, limit: float) -> None:
    """Multiply by `limit / norm` in float64, since a narrower dtype may not hold the factor."""
    for start in range(0, len(flat), BLOCK_ELEMENTS):
        if is_tensor(flat):
            _scale_tensor(flat[start : start + BLOCK_ELEMENTS], norm, limit)
        else:
            _scale_array(flat[start : start + BLOCK_ELEMENTS], norm, limit)


def _scale_tensor(piece: torch.Tensor, norm: float, limit: float) -> None:
    hosted = piece.cpu() if piece.device.type == "mps" else piece  # that device has no float64
    piece.copy_(hosted.double().div(norm).mul(limit))


def _scale_array(piece: NDArray[Any], norm: float, limit: float) -> None:
    wide = np.complex128 if piece.dtype.kind == "c" else np.float64
    with np.errstate(under="ignore"):
        piece[...] = piece.astype(wide) / norm * limit
