"""Sums of squares of layer outputs and their gradients, by compiled loops where the native engine runs."""

from __future__ import annotations

import importlib
import logging
import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.analyzers.tools.samples import small_array
from gradtrack.support.interrupts import pass_on

_logger = logging.getLogger("gradtrack")
_WIDTH: Final = 1024
_WIDEST: Final = 2048
_AT_ONCE: Final = 1 << 18
_SMALLEST, _LARGEST = 1e-12, 1e18
"""Norms whose squares, and those of every element that matters to them, are ordinary float32 numbers."""


def row_squares(rows: Tensor) -> NDArray[np.float64]:
    """Return the sum of squares of each row, with little memory beside them.

    Another device is not waited for until the end; on the CPU a wide row is added up in pieces, since torch adds in
    float32.
    """
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj()).flatten(1)
    compiled = loops_over(rows)
    if compiled is not None:
        loops, values = compiled
        loops.add_squares(values, found := np.empty(len(values)))
        return found
    if not rows.is_cpu or rows.dtype is torch.float64:
        return _norms(rows, torch.float64).square_().cpu().numpy()
    width = rows.shape[1]
    parts = torch.split(rows, max(1, _AT_ONCE // max(width, 1)))
    if width <= _WIDEST:
        return np.concatenate([_squares(part) for part in parts])
    whole = width // _WIDTH * _WIDTH
    pieces = [_squares(part[:, :whole].reshape(len(part), whole // _WIDTH, _WIDTH)).sum(1) for part in parts]
    rest = [_squares(part[:, whole:]) for part in parts]
    return np.concatenate(pieces) + np.concatenate(rest)


def _squares(values: Tensor) -> NDArray[np.float64]:
    """Return the sums of squares over the last dimension, again in float64 where float32 has too small a range."""
    norms = _norms(values, torch.float32).double()
    odd = ~((norms > _SMALLEST) & (norms < _LARGEST))
    if bool(odd.any()):
        norms[odd] = _norms(values[odd], torch.float64)
    found: NDArray[np.float64] = norms.square_().numpy()
    return found


def norms_of(tensors: Sequence[Tensor]) -> list[float]:
    """Return the norms of tensors of real numbers, in one go where they are on another device."""
    if all(tensor.is_cpu for tensor in tensors):
        return [math.sqrt(_sum_of_squares(tensor.detach().reshape(-1))) for tensor in tensors]
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    found: list[float] = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()
    return found


def _sum_of_squares(flat: Tensor) -> float:
    whole = flat.numel() // _WIDTH * _WIDTH
    return float(row_squares(flat[:whole].view(-1, _WIDTH)).sum() + row_squares(flat[whole:].view(1, -1))[0])


def _norms(values: Tensor, dtype: torch.dtype) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=dtype)
    return found


_MOST: Final = 1 << 22
"""The most elements that one thread looks at: beyond it all of torch's threads are faster."""
_ENGINE: Final = "gradtrack.gradients.native.kernels"
_LOOPS: Final = "gradtrack.analyzers.flow.kernels"


def loops_over(tensor: Tensor) -> tuple[Any, NDArray[np.float32]] | None:
    """Return the compiled loops and a view of a tensor for them; None where its elements need other means.

    The loops are there where the native engine has loaded the compiler, which takes half a second.
    """
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous() or _ENGINE not in sys.modules:
        return None
    values = small_array(tensor, _MOST)
    loops = None if values is None else _loops()
    return None if values is None or loops is None else (loops, values)


@cache
def _loops() -> Any:
    """Compile the loops or load them; a compiler that cannot do it leaves the looks to numpy and torch."""
    try:
        return importlib.import_module(_LOOPS)
    except Exception as fault:
        pass_on(fault)
        _logger.warning("the loops for looks could not be compiled: looks take longer", exc_info=True)
        return None
