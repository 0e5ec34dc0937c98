"""A fixed sample of the elements of a tensor, the same ones every time."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from gradtrack.measure.shards import local_part

MOST: Final = 65_536


def sample(tensor: Tensor, most: int = MOST) -> Tensor:
    """Copy at most so many elements that are held here, at equal distances; all of them where there are no more.

    The distance shares no factor with the size of the last dimension, so that no column is left out.
    """
    values = as_real(local_part(tensor.detach()))
    count = values.numel()
    if count <= most:
        return values.reshape(-1).clone()
    stride = _stride(count, values.shape[-1], most)
    if values.is_contiguous():
        return values.view(-1)[::stride].clone()
    return values.take(torch.arange(0, count, stride, device=values.device))


def as_real(tensor: Tensor) -> Tensor:
    """Return a tensor with the real and the imaginary part of complex numbers as its last dimension."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _stride(count: int, last: int, most: int) -> int:
    stride = math.ceil(count / most)
    while math.gcd(stride, last) != 1:
        stride += 1
    return stride
