"""Counts of the gradient elements that a format of fewer bits cannot hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from gradtrack.analyzers.tools.samples import as_real, read_together
from gradtrack.gradients.distributed.shards import local_part
from gradtrack.gradients.torch_cpu import flat

_PIECE: Final = 1 << 22
"""The elements that are looked at in one go, so that a large gradient needs little memory beside itself."""
_MOST_SCALE: Final = 100


class Format(NamedTuple):
    """The range of a floating-point format, with rounding to the nearest and ties to even."""

    largest: float
    flushed: float
    """The largest number that becomes zero: half of the smallest above it."""
    endless: float
    """The smallest number that becomes infinite."""

    @classmethod
    def of(cls, dtype: torch.dtype) -> Format:
        """Return the range of a type of torch."""
        info = torch.finfo(dtype)
        spacing = math.ldexp(info.eps, math.frexp(info.max)[1] - 1)
        return cls(info.max, info.smallest_normal * info.eps / 2, info.max + spacing / 2)


FLOAT16: Final = Format.of(torch.float16)
BFLOAT16: Final = Format.of(torch.bfloat16)
FLOAT8: Final = tuple(map(Format.of, (torch.float8_e4m3fn, torch.float8_e5m2)))


class Counts(NamedTuple):
    """Numbers of finite elements: all that are not zero, and those of them that a format would lose.

    Those after `bfloat16_overflow` depend on a scale, so they are not known where a gradient is spread over ranks:
    `float16_scaled` counts what becomes zero in float16 under the largest power of two that lets no element of any
    gradient overflow; in float8 each tensor has a scale of its own, which takes its largest element to the end of the
    range, as float8 recipes do.
    """

    nonzero: float = 0.0
    float16_underflow: float = 0.0
    float16_overflow: float = 0.0
    bfloat16_underflow: float = 0.0
    bfloat16_overflow: float = 0.0
    float16_scaled: float = math.nan
    float8_e4m3: float = math.nan
    float8_e5m2: float = math.nan


NUM_FIXED: Final = 5
"""The counts that depend on no scale, with which sums over ranks begin."""


def fixed_counts(gradients: Mapping[str, Tensor]) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the counts that depend on no scale, and the largest finite magnitude, by the name of the parameter."""
    rows = {name: [_fixed(piece) for piece in _magnitudes(grad)] for name, grad in gradients.items()}
    rows = {name: parts for name, parts in rows.items() if parts}
    both = [tensor for parts in rows.values() for tensor in (_total(parts, 0), _largest(parts))]
    values = iter(read_together(both))
    counts, largest = dict[str, list[float]](), dict[str, float]()
    for name in rows:
        counts[name] = [float(value) for value in next(values).tolist()]
        largest[name] = float(next(values))
    return counts, largest


def all_counts(gradients: Mapping[str, Tensor]) -> tuple[dict[str, Counts], float | None]:
    """Return the counts by the name of the parameter, and the scale for float16; None where every element is zero."""
    fixed, largest = fixed_counts(gradients)
    scale = float16_scale(max(largest.values(), default=0.0))
    rows = {
        name: [_scaled(piece, _factors(largest[name], scale)) for piece in _magnitudes(gradients[name])]
        for name in fixed
        if largest[name]
    }
    above = dict(zip(rows, read_together(torch.stack(parts).sum(0) for parts in rows.values()), strict=True))
    found: dict[str, Counts] = {}
    for name, counts in fixed.items():
        kept = above[name].tolist() if name in above else [counts[0]] * 3
        found[name] = Counts(*counts, *(counts[0] - value for value in kept))
    return found, scale


def float16_scale(largest: float) -> float | None:
    """Return the largest power of two by which the largest magnitude stays in the range of float16."""
    if not largest:
        return None
    exponent = math.frexp(FLOAT16.largest / largest)[1] - 1
    return math.ldexp(1.0, max(-_MOST_SCALE, min(_MOST_SCALE, exponent)))


def _factors(largest: float, scale: float | None) -> list[float]:
    return [scale or 1.0, *(one.largest / largest for one in FLOAT8)]


def _magnitudes(grad: Tensor) -> Iterator[Tensor]:
    """Yield the magnitudes of the elements piece by piece, with zeros for those that are not finite."""
    own = local_part(grad)
    if own.is_sparse:
        own = own.coalesce().values()
    if own.layout is not torch.strided or not own.numel():
        return
    for piece in torch.split(flat(as_real(own.detach())), _PIECE):
        wide = piece if piece.dtype is torch.float64 else piece.float()
        yield torch.where(wide.isfinite(), wide.abs(), 0.0)


def _fixed(piece: Tensor) -> tuple[Tensor, Tensor]:
    """Return the counts that depend on no scale, and the largest magnitude."""
    nonzero = (piece > 0).sum()
    formats = [count for one in (FLOAT16, BFLOAT16) for count in (_lost(piece, one, nonzero), _over(piece, one))]
    return torch.stack([nonzero, *formats]), piece.max()


def _lost(piece: Tensor, one: Format, nonzero: Tensor) -> Tensor:
    return nonzero - (piece > one.flushed).sum()


def _over(piece: Tensor, one: Format) -> Tensor:
    return (piece >= one.endless).sum()


def _scaled(piece: Tensor, factors: Sequence[float]) -> Tensor:
    """Return how many elements are kept in float16 and in both kinds of float8, each with its scale."""
    formats = (FLOAT16, *FLOAT8)
    kept = [(piece * factor > one.flushed).sum() for one, factor in zip(formats, factors, strict=True)]
    return torch.stack(kept)


def _total(parts: Sequence[tuple[Tensor, Tensor]], which: int) -> Tensor:
    return torch.stack([part[which] for part in parts]).sum(0)


def _largest(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([part[1] for part in parts]).max()
