"""Statistics of attention: entropy over visible keys and its floor, sparsity, head diversity, token similarity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradtrack.analyzers.tools.spectra import centred, effective_rank

_SPARSE: float = 0.1
_EQUAL_LENGTHS: float = 0.03


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a call is looked at: the first sequences, and query rows spread evenly over the others."""

    sequences: int = 2
    rows: int = 64

    def chosen_rows(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return the chosen rows of a sequence, always with the last, which sees the most."""
        count = min(self.rows, length)
        steps = torch.arange(count, device=device) * (length - 1) // max(count - 1, 1)
        return (length - 1 - steps).flip(0)


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """A few query rows of one attention call: logits (batch, heads, rows, keys) and which keys each row sees.

    `genuine` (batch, rows) tells the queries that are no padding, `index` their places, where these are the keys' too.
    """

    logits: Tensor
    visible: Tensor
    genuine: Tensor
    index: Tensor | None = None

    @property
    def masked(self) -> Tensor:
        """Return the logits, minus infinity where a row sees nothing."""
        return self.logits.masked_fill(~self.visible, -math.inf)


def weights_of(masked: Tensor) -> Tensor:
    """Return the probabilities before dropout; a row that sees no key is all zero."""
    return torch.softmax(masked, dim=-1).nan_to_num(nan=0.0)


def normalized_entropy(nats: Tensor, count: Tensor) -> Tensor:
    """Return the entropy of each row over ln of the number of its visible keys; NaN with fewer than two of them."""
    return torch.where(count >= 2, nats / _log(count, nats), math.nan)


def entropy_floor(spread: Tensor, count: Tensor) -> Tensor:
    """Return the least entropy in nats of a row of `count` logits whose centred norm is `spread` (Zhai et al. 2023)."""
    others = count.clamp_min(2).to(spread.dtype) - 1
    gap = spread * ((others + 1) / others).sqrt()
    odds = others * torch.exp(-gap)
    left = torch.where(odds > 0, odds * gap / (1 + odds), 0.0)  # where nothing is left of them the gap may be infinite
    return torch.where(count >= 2, torch.log1p(odds) + left, math.nan)


def sparsity(weights: Tensor, count: Tensor) -> Tensor:
    """Return the share of a row's visible keys whose weight is below a tenth of the uniform weight.

    `count` is the number of visible keys; the others have no weight.
    """
    faint = (weights < _SPARSE / count.clamp_min(1).unsqueeze(-1)).sum(-1) - (weights.shape[-1] - count)
    return torch.where(count >= 2, faint / count.clamp_min(1), math.nan)


def head_diversity(weights: Tensor, nats: Tensor, count: Tensor) -> Tensor:
    """Return the generalised Jensen-Shannon divergence of the heads of each row, over its largest possible value.

    0 means that all heads do the same, 1 that no two look at the same key; NaN for a single head or a single key.
    `nats` are the entropies of the weights.
    """
    heads, count = weights.shape[-3], count.amax(-2)
    mixed = torch.special.entr(weights.mean(-3)).sum(-1)
    largest = _log(count.clamp_max(max(heads, 2)), weights)
    return torch.where((count >= 2) & (heads >= 2), ((mixed - nats.mean(-2)) / largest).clamp_min(0.0), math.nan)


def residual_and_rank(tokens: Tensor) -> tuple[float, float]:
    """Return how far tokens (tokens, features) are from being all equal, and their effective rank around their mean.

    The residual is 0 when they are equal and near 1 when they differ. Both are NaN where a token is not finite.
    """
    values = tokens.double()
    around, size = centred(values), float(torch.linalg.vector_norm(values))
    residual = float(torch.linalg.vector_norm(around)) / size if size != 0 else 0.0
    finite = bool(around.isfinite().all())
    return residual, effective_rank(_singular_values(around)) if finite else math.nan


def mean_cosine(tokens: Tensor) -> float:
    """Return the mean cosine between two different tokens that are not zero; NaN for fewer than two of them."""
    values = tokens.double()
    sizes = values.norm(dim=-1, keepdim=True)
    units = (values / sizes)[sizes[:, 0] != 0]
    count = len(units)
    if count < 2:
        return math.nan
    total = float(units.sum(0).square().sum()) - float(units.square().sum())
    return total / (count * (count - 1))


@dataclass(frozen=True, slots=True)
class HeadStatistics:
    """The sums of one attention call: a vector over heads for each quantity, and numbers for the whole layer.

    Without a genuine row that sees two keys `num_rows` is 0, and the rest means nothing.
    """

    entropy: Tensor
    floor: Tensor
    sparsity: Tensor
    max_logit: Tensor
    softness: Tensor
    low_entropy: Tensor
    diversity: Tensor
    num_rows: Tensor
    num_keys: int

    def tensors(self) -> list[Tensor]:
        """Return what has to be read."""
        return [getattr(self, name) for name in self._read()]

    def of(self, tensors: Iterator[Tensor]) -> HeadStatistics:
        """Return the same with the next tensors that were read."""
        parts: dict[str, Any] = {name: next(tensors) for name in self._read()}
        return replace(self, **parts)

    def _read(self) -> list[str]:
        return [one.name for one in fields(self) if one.name != "num_keys"]


def measure_heads(rows: AttentionRows) -> HeadStatistics | None:
    """Reduce the rows of one call over sequences and queries; None where no genuine row is known to see two keys.

    All but the largest logit is NaN for a head with a logit that is not finite.
    """
    count = rows.visible.sum(-1)
    counted = (count >= 2) & rows.genuine.unsqueeze(1)
    num_rows = counted.any(1).sum()
    if num_rows.is_cpu and not num_rows:
        return None
    hidden, masked = ~rows.visible, rows.masked
    weights, shown = weights_of(masked), rows.logits.masked_fill(hidden, 0.0)
    nats, total = torch.special.entr(weights).sum(-1), shown.sum(-1, dtype=torch.float64)
    broken = (~total.isfinite() & counted).any((0, 2))
    entropy = _only(normalized_entropy(nats, count), counted)
    floor = entropy_floor(_spread(shown, total, hidden, count), count) / _log(count, weights)
    diversity = torch.where(rows.genuine, head_diversity(weights, nats, count), math.nan)
    by_head = {
        "entropy": entropy,
        "floor": _only(floor, counted),
        "sparsity": _only(sparsity(weights, count), counted),
        "softness": _only(1 - torch.linalg.vector_norm(weights, dim=-1).square(), counted),
    }
    return HeadStatistics(
        **{name: _mean(values).masked_fill(broken, math.nan) for name, values in by_head.items()},
        max_logit=masked.amax(-1).masked_fill(~counted, -math.inf).amax((0, 2)),
        low_entropy=torch.nanquantile(entropy.masked_fill(broken.unsqueeze(-1), math.nan), 0.05),
        diversity=diversity.nanmean().masked_fill(broken.any(), math.nan),
        num_rows=num_rows,
        num_keys=rows.logits.shape[-1],
    )


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


class TokenSample(NamedTuple):
    """Tokens of one sequence, and which of them are no padding."""

    tokens: Tensor
    genuine: Tensor


def sample_tokens(sequences: Sequence[Tensor], rows: AttentionRows | None, limits: Limits) -> list[TokenSample]:
    """Pick tokens of the first sequences; nothing of those that are known to have fewer than two."""
    found = []
    for index, sequence in enumerate(sequences[: limits.sequences]):
        picked = sequence[limits.chosen_rows(len(sequence), sequence.device)]
        genuine = torch.ones(len(picked), dtype=torch.bool, device=picked.device)
        if rows is not None and rows.genuine.shape[0] > index and rows.genuine.shape[1] == len(picked):
            genuine = rows.genuine[index]
        if len(picked) >= 2 and not (genuine.is_cpu and genuine.sum() < 2):
            found.append(TokenSample(picked, genuine))
    return found


def token_statistics(samples: Sequence[TokenSample]) -> TokenStatistics | None:
    """Measure the tokens of some sequences, without those that are padding."""
    sequences = [tokens[genuine] for tokens, genuine in samples]
    found = [(*residual_and_rank(picked), mean_cosine(picked)) for picked in sequences if len(picked) >= 2]
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


def _singular_values(matrix: Tensor) -> Tensor:
    """Return the singular values from the smaller Gram matrix; those that could be rounding are zero."""
    if not matrix.numel():
        return matrix.new_zeros(0)
    size = matrix.abs().amax().clamp_min(torch.finfo(matrix.dtype).tiny)  # whose squares could leave the range
    scaled = (matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T) / size
    squares = torch.linalg.eigvalsh(scaled @ scaled.T)
    rounding = squares[-1] * len(squares) * torch.finfo(matrix.dtype).eps
    return torch.where(squares > rounding, squares, 0.0).sqrt() * size


def _log(count: Tensor, like: Tensor) -> Tensor:
    """Return ln of a number of keys, of two at least, as precisely as the weights are known."""
    return count.clamp_min(2).to(like.dtype).log()


def _spread(shown: Tensor, total: Tensor, hidden: Tensor, count: Tensor) -> Tensor:
    """Return the norm of each row's visible logits after their mean is taken away."""
    centre = (total / count.clamp_min(1)).to(shown.dtype).unsqueeze(-1)
    found: Tensor = torch.linalg.vector_norm((shown - centre).masked_fill(hidden, 0.0), dim=-1, dtype=torch.float64)
    return found


def _only(values: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, values, math.nan)


def _mean(values: Tensor) -> Tensor:
    """Reduce (batch, heads, rows) to a vector over heads."""
    return torch.nanmean(values.transpose(0, 1).flatten(1), dim=1)


def are_constant(lengths: Tensor) -> Tensor:
    """Say whether lengths differ by no more than a few percent."""
    found = lengths.double()
    return found.std() <= _EQUAL_LENGTHS * found.mean()
