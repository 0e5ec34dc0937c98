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
    values = local_part(tensor.detach())
    values = torch.view_as_real(values) if values.is_complex() else values
    count = values.numel()
    if count <= most:
        return values.reshape(-1).clone()
    stride = _stride(count, values.shape[-1], most)
    if values.is_contiguous():
        return values.view(-1)[::stride].clone()
    return values.take(torch.arange(0, count, stride, device=values.device))


def _stride(count: int, last: int, most: int) -> int:
    stride = math.ceil(count / most)
    while math.gcd(stride, last) != 1:
        stride += 1
    return stride
