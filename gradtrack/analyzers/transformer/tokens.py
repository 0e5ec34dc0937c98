"""Statistics of the tokens that leave a block of a transformer: how different they still are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradtrack.analyzers.transformer.logits import Limits
from gradtrack.analyzers.transformer.statistics import AttentionRows, mean_cosine, residual_and_rank


class TokenStatistics(NamedTuple):
    """The difference that is left between the tokens of the residual stream after a block."""

    residual: float
    cosine: float
    rank: float


def call_sizes(first: Tensor, num_heads: int | None) -> tuple[int, int] | None:
    """Return (batch, queries) of what an attention call was given."""
    if first.is_nested or first.ndim < 2:
        return None
    batch = 1 if first.ndim == 2 else first.shape[0]
    return (batch // num_heads if num_heads and first.ndim == 3 else batch), first.shape[-2]


def are_alike(before: Tensor, after: Tensor) -> bool:
    """Whether a module returned what has the shape of what it took."""
    return before.is_nested == after.is_nested and (after.is_nested or before.shape == after.shape)


def sequences_of(tokens: Tensor, sizes: tuple[int, int] | None, module: nn.Module) -> Sequence[Tensor]:
    """Take the tokens of a batch apart into sequences of (tokens, features)."""
    values = tokens.detach()
    if values.is_nested:
        return values.unbind()
    if values.ndim not in (2, 3) or torch._C._functorch.is_functorch_wrapped_tensor(tokens):
        return ()
    if values.ndim == 2:
        return (values,)
    return (values.transpose(0, 1) if _sequence_first(values, sizes, module) else values).unbind()


def token_statistics(sequences: Sequence[Tensor], rows: AttentionRows | None, limits: Limits) -> TokenStatistics | None:
    """Measure the tokens of the first sequences, without those that are padding."""
    found = []
    for index, sequence in enumerate(sequences[: limits.sequences]):
        picked = sequence[limits.chosen_rows(len(sequence)).to(sequence.device)]
        if rows is not None and rows.genuine.shape[0] > index and rows.genuine.shape[1] == len(picked):
            picked = picked[rows.genuine[index]]
        if len(picked) >= 2:
            found.append((*residual_and_rank(picked), mean_cosine(picked)))
    if not found:
        return None
    cosines = [cosine for _, _, cosine in found if not math.isnan(cosine)]
    residual, rank, _ = (sum(column) / len(found) for column in zip(*found, strict=True))
    return TokenStatistics(residual, sum(cosines) / len(cosines) if cosines else math.nan, rank)


def _sequence_first(values: Tensor, sizes: tuple[int, int] | None, module: nn.Module) -> bool:
    if sizes is None or sizes[0] != sizes[1]:
        return sizes is not None and tuple(values.shape[:2]) == (sizes[1], sizes[0])
    inner = next((part for part in module.modules() if isinstance(part, nn.MultiheadAttention)), None)
    return inner is not None and not inner.batch_first
