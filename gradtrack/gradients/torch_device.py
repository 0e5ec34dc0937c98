"""The torch engine on an accelerator (GPU): sums that stay on the device until the host reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

WITHOUT_FLOAT64: Final = frozenset({"mps"})


def measure(grads: Sequence[Tensor], *, exact: bool) -> Tensor:
    """Return the rows of sums as one matrix on the device of the gradients, without waiting for it.

    Without `exact` every element is taken to be finite: a row that is not so shows it by a norm that is not finite,
    and has to be measured again. With it the sums are over the finite elements, and the others are counted.
    """
    with torch.no_grad():
        wide = torch.float32 if grads[0].device.type in WITHOUT_FLOAT64 else torch.float64
        columns = [_exact(grad, wide) for grad in grads] if exact else _quick(grads, wide)
        return torch.stack([torch.stack(column) for column in columns])


def measure_around(grads: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Return for each gradient a centre between its ends, and the sums of the deviations from it and their squares.

    The centre is 0 unless all elements lie on one side of zero and close together. The host does not wait.
    """
    with torch.no_grad():
        lows, highs = ends.unbind(dim=1)
        near, far = torch.minimum(lows.abs(), highs.abs()), torch.maximum(lows.abs(), highs.abs())
        close = (lows <= highs) & (lows.sign() == highs.sign()) & (far / 2 <= near)
        middles = torch.where(lows == highs, lows, lows / 2 + highs / 2)
        centres = torch.where(close, middles, torch.zeros_like(lows))
        left = [
            torch.where(grad.isfinite(), grad.detach() - center, 0.0)
            for grad, center in zip(grads, centres, strict=True)
        ]
        sums = [torch.stack([one.sum(), one.square().sum()]) for one in left]
        return torch.cat([centres[:, None], torch.stack(sums)], dim=1)


def _quick(grads: Sequence[Tensor], wide: torch.dtype) -> list[list[Tensor]]:
    filled = [index for index, grad in enumerate(grads) if grad.numel()]
    present = [grads[index] for index in filled]
    norms = torch._foreach_norm(present, 2, dtype=wide) if present else []
    highs = torch._foreach_max(present) if present else []
    nothing = torch.zeros((), dtype=wide, device=grads[0].device)
    empty = [nothing, nothing, nothing + torch.inf, nothing - torch.inf, nothing, nothing, nothing, nothing]
    columns = [empty] * len(grads)
    for index, grad, norm, high in zip(filled, present, norms, highs, strict=True):
        zeros = grad.numel() - torch.count_nonzero(grad)
        row = [grad.sum(dtype=wide), norm * norm, grad.amin(), high, zeros]
        columns[index] = [*(value.to(wide) for value in row), nothing, nothing, nothing]
    return columns


def _exact(grad: Tensor, wide: torch.dtype) -> list[Tensor]:
    finite = grad.isfinite()
    values = torch.where(finite, grad, 0)
    norm = torch.linalg.vector_norm(values, dtype=wide)
    inside = torch.finfo(grad.dtype)
    ends = [torch.full((1,), end, dtype=grad.dtype, device=grad.device) for end in (inside.max, inside.min)]
    empty = grad.new_zeros(()).to(wide)
    low, high = ((empty + torch.inf), (empty - torch.inf))
    if grad.numel():
        found = finite.any()
        low = torch.where(found, torch.where(finite, grad, ends[0]).amin().to(wide), low)
        high = torch.where(found, torch.where(finite, grad, ends[1]).amax().to(wide), high)
    counts = [
        grad.numel() - torch.count_nonzero(grad),
        grad.isnan().sum(),
        grad.isposinf().sum(),
        grad.isneginf().sum(),
    ]
    return [values.sum(dtype=wide), norm * norm, low, high, *(count.to(wide) for count in counts)]
