"""Attention's numbers against loops in float64 that were written from their definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradtrack.analyzers.transformer.logits import rows_of_attention, rows_of_softmax
from gradtrack.analyzers.transformer.statistics import HeadStatistics, Limits, measure_heads

HEADS, KEYS, TOKENS = 4, 2, 6
PRECISION = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-4, torch.float16: 1e-4}

SCALES = (1e-20, 1.0, 30.0, 1e20)
KINDS = [(dtype, scale) for dtype in PRECISION for scale in SCALES if dtype is not torch.float16 or scale < 1e20]


class Loops:
    """What the heads of one call do, row by row."""

    def __init__(self, query: Tensor, key: Tensor, mask: Tensor | None, *, causal: bool) -> None:
        self.rows: dict[tuple[int, int, int], tuple[Any, Any]] = {}
        q, k = query.double().numpy(), key.double().numpy()
        genuine = np.ones((len(q), TOKENS), bool)
        if mask is not None:
            genuine[0, -2:] = False
        for batch, head, row in np.ndindex(len(q), HEADS, TOKENS):
            logits = q[batch, head, row] @ k[batch, head * KEYS // HEADS].T / math.sqrt(q.shape[-1])
            seen = np.arange(TOKENS) <= (row if causal else TOKENS)
            seen &= genuine[batch]
            if genuine[batch, row] and seen.sum() >= 2:
                probs = np.exp(logits[seen] - logits[seen].max())
                full = np.zeros(TOKENS)
                full[seen] = probs / probs.sum()
                self.rows[batch, head, row] = logits[seen], full

    def of_head(self, head: int, number: Any) -> float:
        """Average a number over the rows of a head."""
        return float(np.mean([number(*found) for (_, one, _), found in self.rows.items() if one == head]))

    def diversity(self) -> float:
        """Return the mean divergence of the heads of a row over ln of the most that it can be."""
        places = sorted({(batch, row) for batch, _, row in self.rows})
        found = []
        for batch, row in places:
            all_heads = [self.rows[batch, head, row] for head in range(HEADS)]
            mixed = nats(np.mean([probs for _, probs in all_heads], axis=0))
            alone = float(np.mean([nats(probs) for _, probs in all_heads]))
            found.append((mixed - alone) / math.log(min(HEADS, len(all_heads[0][0]))))
        return float(np.mean(found))


def nats(probs: Any) -> float:
    """Return an entropy."""
    known = probs[probs > 0]
    return float(-(known * np.log(known)).sum())


def entropy(logits: Any, probs: Any) -> float:
    """Return the entropy over that of a uniform row."""
    return nats(probs) / math.log(len(logits))


def floor(logits: Any, _: Any) -> float:
    """Return the entropy of one key against equal others, at the same centred norm, over that of a uniform row."""
    count = len(logits)
    gap = float(np.linalg.norm(logits - logits.mean())) * math.sqrt(count / (count - 1))
    extreme = np.exp(np.where(np.arange(count) == 0, 0.0, -gap))
    return nats(extreme / extreme.sum()) / math.log(count)


def sparsity(logits: Any, probs: Any) -> float:
    """Return the share of visible keys under a tenth of the uniform weight."""
    return float((np.sort(probs)[-len(logits) :] < 0.1 / len(logits)).mean())


def drawn(dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
    """Draw queries and grouped keys whose logits have about this scale."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, TOKENS, 8, generator=generator) for heads in (HEADS, KEYS))
    return (query * math.sqrt(scale)).to(dtype), (key * math.sqrt(scale)).to(dtype)


def assert_equal(found: HeadStatistics | None, expected: Loops, tolerance: float) -> None:
    """Compare every number of every head."""
    assert found is not None
    for name, number in (("entropy", entropy), ("floor", floor), ("sparsity", sparsity)):
        wanted = [expected.of_head(head, number) for head in range(HEADS)]
        assert getattr(found, name).tolist() == pytest.approx(wanted, abs=max(tolerance, 1e-6)), name
    assert float(found.diversity) == pytest.approx(expected.diversity(), abs=tolerance)


@pytest.mark.parametrize(("dtype", "scale"), KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", ["no mask", "boolean", "additive"])
def test_grouped_heads_with_causal_and_padding_masks(
    dtype: torch.dtype, scale: float, causal: bool, masked: str
) -> None:
    """Every number is that of the loops in every precision, at logits from 1e-20 to 1e20."""
    query, key = drawn(dtype, scale)
    padding = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
    padding[0, ..., -2:] = False
    mask = {"no mask": None, "boolean": padding, "additive": torch.zeros(padding.shape).to(dtype)}[masked]
    if mask is not None and masked == "additive":
        mask = mask.masked_fill(~padding, torch.finfo(dtype).min)
    rows = rows_of_attention(query, key, key, mask, 0.0, causal, enable_gqa=True, limits=Limits())
    assert rows is not None
    assert_equal(measure_heads(rows), Loops(query, key, mask, causal=causal), PRECISION[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_the_softmax_of_an_eager_attention(dtype: torch.dtype, causal: bool) -> None:
    """Logits that a softmax gets, masked by the smallest number of their precision, give the same."""
    query, key = drawn(torch.float64, 3.0)
    logits = query @ key.repeat_interleave(HEADS // KEYS, dim=1).mT / math.sqrt(8)
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1) if causal else torch.zeros(TOKENS, TOKENS).bool()
    rows = rows_of_softmax(logits.to(dtype).masked_fill(hidden, torch.finfo(dtype).min), limits=Limits())
    assert rows is not None
    tolerance = 0.02 if dtype is torch.bfloat16 else PRECISION[dtype]
    found = measure_heads(rows)
    assert found is not None
    expected = Loops(query, key, None, causal=causal)
    assert found.entropy.tolist() == pytest.approx(
        [expected.of_head(head, entropy) for head in range(HEADS)], abs=tolerance
    )
    assert float(found.diversity) == pytest.approx(expected.diversity(), abs=tolerance)


@pytest.mark.parametrize("shape", [(2, 3, 1, 4), (1, 1, 1, 1), (2, 3, 0, 4), (0, 3, 5, 4)])
def test_where_there_is_nothing_to_choose_there_are_no_numbers(shape: tuple[int, ...]) -> None:
    """A single token, no token and no sequence have no entropy."""
    query = torch.randn(shape)
    for rows in (
        rows_of_attention(query, query, query, limits=Limits()),
        rows_of_softmax(query @ query.mT, limits=Limits()),
        rows_of_softmax((query @ query.mT).flatten(0, 1), max(shape[1], 1), limits=Limits()),
    ):
        assert rows is None or measure_heads(rows) is None


def test_a_single_head_has_no_diversity() -> None:
    """With one head there is an entropy, and nothing for the head to differ from."""
    query = torch.randn(2, 1, 5, 4)
    rows = rows_of_attention(query, query, query, limits=Limits())
    found = None if rows is None else measure_heads(rows)
    assert found is not None
    assert 0 < float(found.entropy[0]) <= 1
    assert math.isnan(float(found.diversity))
