"""A few rows of attention logits, computed from the arguments of an attention call of any form."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gradtrack.analyzers.transformer.statistics import AttentionRows, Limits

_MASKED: float = -5000.0
"""An additive mask below this hides a key: the usual -1e4, -1e9 and -inf do, biases for position do not."""


def rows_of_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    limits: Limits,
) -> AttentionRows | None:
    """Return the rows of a call of `scaled_dot_product_attention`."""
    if query.is_nested or key.is_nested or query.ndim < 2:
        return None
    mask = None if attn_mask is None else _as_four(attn_mask, query)
    q, k = _split(query)[: limits.sequences], _split(key)[: limits.sequences]
    mask = mask if mask is None or mask.shape[0] == 1 else mask[: limits.sequences]
    length, num_keys = q.shape[-2], k.shape[-2]
    rows = limits.chosen_rows(length, q.device)
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    k = k.to(kind)
    if enable_gqa and k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    logits = q[:, :, rows].to(kind) @ k.transpose(-2, -1) * factor
    visible = torch.ones(1, 1, len(rows), num_keys, dtype=torch.bool, device=q.device)
    if is_causal:
        visible = (rows.unsqueeze(-1) >= torch.arange(num_keys, device=q.device)).expand_as(visible)
    if mask is not None:
        part = mask if mask.shape[2] == 1 else mask[:, :, rows]
        visible = visible & _shown(part)
        logits = logits if part.dtype == torch.bool else logits + part.to(kind).masked_fill(~_shown(part), 0.0)
    genuine = _genuine(mask, is_causal, length, num_keys)
    genuine = torch.ones(1, length, dtype=torch.bool, device=q.device) if genuine is None else genuine
    return AttentionRows(
        logits,
        visible.expand_as(logits),
        genuine[:, rows].to(q.device).expand(logits.shape[0], len(rows)),
        rows if length == num_keys else None,
    )


def rows_of_softmax(logits: Tensor, num_heads: int | None = None, *, limits: Limits) -> AttentionRows | None:
    """Return the rows of a softmax over attention logits; `num_heads` splits a first axis of batch times heads."""
    if logits.is_nested or logits.ndim < 3 or not logits.is_floating_point() or not logits.numel():
        return None
    shaped = logits.reshape(-1, num_heads, *logits.shape[1:]) if num_heads and logits.ndim == 3 else _split(logits)
    part = shaped[: limits.sequences]
    length, num_keys = part.shape[-2:]
    rows = limits.chosen_rows(length, part.device)
    shown = _unmasked(part[:, 0])
    chosen = part[:, :, rows]
    kind = torch.float64 if part.dtype == torch.float64 else torch.float32
    genuine = _unpadded(shown) if length == num_keys else torch.ones_like(shown[..., 0])
    return AttentionRows(chosen.to(kind), _unmasked(chosen), genuine[:, rows], rows if length == num_keys else None)


def rows_of_packed(
    source: Tensor,
    num_heads: int,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    mask_type: int | None,
    *,
    limits: Limits,
) -> AttentionRows | None:
    """Return the rows of torch's fused self-attention, whose mask marks hidden keys: of each batch for type 1."""
    hidden = None
    if mask is not None:
        hidden = mask.bool()[:, None, None] if mask_type == 1 else mask.bool()[(None,) * (4 - mask.ndim)]
    if source.is_nested:
        parts = source.unbind()[: limits.sequences]
        lengths = torch.tensor([len(part) for part in parts], device=source.device)
        source = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
        hidden = (torch.arange(source.shape[1], device=source.device) >= lengths.unsqueeze(-1))[:, None, None]
    size = weight.shape[0] // 3
    offset = None if bias is None else bias[: 2 * size]
    both = torch.nn.functional.linear(source[: limits.sequences], weight[: 2 * size], offset)
    shape = (*both.shape[:2], num_heads, -1)
    query, key = (part.reshape(shape).transpose(1, 2) for part in torch.chunk(both, 2, dim=-1))
    return rows_of_attention(query, key, key, None if hidden is None else ~hidden, limits=limits)


def is_attention_softmax(logits: Any, dim: int | None, named: str, *, is_product: bool = False) -> bool:
    """Tell whether a softmax is one over attention logits.

    It runs over the last of four axes, or over a square that is a product, or that of an attention by its name.
    """
    if not isinstance(logits, Tensor) or dim is None or logits.ndim < 3 or dim % logits.ndim != logits.ndim - 1:
        return False
    square = logits.shape[-1] == logits.shape[-2] > 1
    told = is_product or logits.ndim > 4 or any(word in named.lower() for word in ("att", "head"))
    return logits.ndim == 4 or (square and told)


def contraction(equation: str, first: Tensor, second: Tensor) -> tuple[int, int] | None:
    """Return the axes of two operands of an einsum that it sums over, where it is one of each."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    names = terms.split(",")
    if not arrow or "." in equation or len(names) != 2 or (len(names[0]), len(names[1])) != (first.ndim, second.ndim):
        return None
    summed = set(names[0]) & set(names[1]) - set(result)
    if len(summed) != 1:
        return None
    letter = summed.pop()
    return names[0].index(letter), names[1].index(letter)


def _split(values: Tensor) -> Tensor:
    """Shape (..., rows, columns) as (batch, heads, rows, columns)."""
    if values.ndim == 2:
        return values[None, None]
    return values.unsqueeze(1) if values.ndim == 3 else values.flatten(0, -4)


def _as_four(mask: Tensor, query: Tensor) -> Tensor:
    if query.ndim > 4:
        return mask.expand(*query.shape[:-2], *mask.shape[-2:]).flatten(0, -4)
    if query.ndim == 3 and mask.ndim == 3:
        return mask.unsqueeze(1)
    return mask[(None,) * (4 - mask.ndim)]


def _shown(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > _MASKED


def _unmasked(logits: Tensor) -> Tensor:
    """Tell which keys a softmax can see: those not pushed out of reach of the largest of their row."""
    smallest = torch.finfo(logits.dtype).min / 2
    precise = torch.promote_types(logits.dtype, torch.float32)
    limit = (logits.amax(-1, keepdim=True).to(precise) + _MASKED).clamp_min(smallest)
    return ~(logits <= limit) | (logits == math.inf)  # what is not finite is not masked: it is a fault


def _genuine(mask: Tensor | None, is_causal: bool, length: int, num_keys: int) -> Tensor | None:
    if mask is None or length != num_keys:
        return None
    shown = _shown(mask[:, 0]).expand(-1, length, num_keys)
    return _unpadded(shown.tril() if is_causal else shown)


def _unpadded(shown: Tensor) -> Tensor:
    """Tell which positions (batch, positions) of a self-attention are no padding.

    A padded key is hidden from every row. Rows that see everything are left out of the judgement unless the last does
    too, because the rows of padded queries are often opened to all keys, so that their softmax is defined.
    """
    everything = shown.all(-1)
    seen = (shown & ~everything.unsqueeze(-1)).any(-2)
    return seen | everything[:, -1:]
