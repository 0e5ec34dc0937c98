"""The quantities of attention, held to their golden values and to laws."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrack.analyzers.transformer import statistics
from gradtrack.analyzers.transformer.statistics import (
    AttentionRows,
    entropy_floor,
    mean_cosine,
    measure_heads,
    residual_and_rank,
)

Causal = tuple[torch.Tensor, torch.Tensor]


def causal(heads: int = 4, length: int = 16) -> Causal:
    """Return uniform causal attention and what it can see."""
    visible = torch.ones(length, length, dtype=torch.bool).tril().expand(1, heads, length, length)
    return visible / visible.sum(-1, keepdim=True), visible


def nats(weights: torch.Tensor) -> torch.Tensor:
    """Return the entropy of each row."""
    found: torch.Tensor = torch.special.entr(weights).sum(-1)
    return found


def residual(tokens: torch.Tensor) -> float:
    """Return how far tokens are from being equal."""
    return residual_and_rank(tokens)[0]


def rows(logits: torch.Tensor, visible: torch.Tensor | None = None) -> AttentionRows:
    """Return rows of logits (heads, rows, keys) without padding."""
    seen = torch.ones_like(logits, dtype=torch.bool) if visible is None else visible
    return AttentionRows(logits[None], seen[None], torch.ones(1, logits.shape[1], dtype=torch.bool))


def test_uniform_causal_attention_is_fully_uncertain() -> None:
    """Golden A1: over visible keys uniform causal attention has entropy 1, over all keys it would have 0.6914."""
    weights, visible = causal()
    entropy = statistics.normalized_entropy(nats(weights), visible.sum(-1))
    assert torch.isnan(entropy[..., 0]).all()
    assert torch.allclose(entropy[..., 1:], torch.ones(()), atol=1e-6)
    naive = torch.special.entr(weights).sum(-1) / math.log(16)
    assert float(naive.mean()) == pytest.approx(0.6914, abs=1e-4)


def test_uniform_attention_is_neither_sparse_nor_diverse() -> None:
    """Golden A1: uniform attention has sparsity 0 at any length and heads without diversity."""
    weights, visible = causal(length=256)
    count = visible.sum(-1)
    assert float(statistics.sparsity(weights, count)[..., 1:].max()) == 0
    assert float(statistics.head_diversity(weights, nats(weights), count)[..., 1:].max()) == pytest.approx(0, abs=1e-6)


def test_attention_to_one_key_is_certain() -> None:
    """Golden A2: one-hot rows have entropy 0 and all but one key are sparse."""
    weights = torch.eye(8).expand(1, 2, 8, 8)
    count = torch.full((1, 2, 8), 8)
    assert float(statistics.normalized_entropy(nats(weights), count).abs().max()) == pytest.approx(0, abs=1e-6)
    assert float(statistics.sparsity(weights, count).mean()) == pytest.approx(7 / 8)


def test_heads_that_share_no_key_are_fully_diverse() -> None:
    """Golden A3: four heads on four different keys have diversity 1."""
    weights = torch.stack([torch.eye(4)[head].expand(4, 4) for head in range(4)])[None]
    diversity = statistics.head_diversity(weights, nats(weights), torch.full((1, 4, 4), 4))
    assert torch.allclose(diversity, torch.ones(()), atol=1e-6)


@pytest.mark.parametrize("size", [4, 16, 64])
def test_rank_residual_of_known_tokens(size: int) -> None:
    """Golden A4: equal tokens have residual 0, those of an identity matrix sqrt(1 - 1/n)."""
    assert residual(torch.ones(size, 5)) == pytest.approx(0, abs=1e-6)
    assert residual(torch.eye(size)) == pytest.approx(math.sqrt(1 - 1 / size), abs=1e-6)


def test_attention_without_skips_makes_tokens_equal() -> None:
    """Golden A4: five layers of attention alone take the residual below a hundredth of its start."""
    torch.manual_seed(0)
    tokens = torch.randn(32, 16, dtype=torch.float64)
    start = residual(tokens)
    for _ in range(5):
        query, key = tokens @ torch.randn(16, 16).double() / 4, tokens @ torch.randn(16, 16).double() / 4
        tokens = torch.softmax(query @ key.T / 4, dim=-1) @ tokens
    assert residual(tokens) < 1e-2 * start


@pytest.mark.parametrize("count", [4, 16, 64])
@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
def test_entropy_floor_is_reached_and_never_broken(count: int, spread: float) -> None:
    """Golden A5: one logit against equal others lies on the floor, and no random row of that spread below it."""
    torch.manual_seed(count)
    one = torch.zeros(count, dtype=torch.float64)
    one[0] = 1.0
    random = torch.randn(2000, count, dtype=torch.float64)
    logits = torch.cat([one[None], random])
    logits = logits - logits.mean(-1, keepdim=True)
    logits = logits / logits.norm(dim=-1, keepdim=True) * spread
    entropy = torch.special.entr(torch.softmax(logits, dim=-1)).sum(-1)
    floor = float(entropy_floor(torch.tensor(spread, dtype=torch.float64), torch.tensor(count)))
    assert float(entropy[0]) == pytest.approx(floor, abs=1e-9)
    assert float(entropy.min()) >= floor - 1e-9


@given(st.integers(1, 4), st.integers(2, 12), st.floats(0.01, 20), st.integers(0, 2**31))
def test_quantities_stay_in_their_range(heads: int, keys: int, scale: float, seed: int) -> None:
    """Entropy, floor, sparsity and diversity lie between 0 and 1, and entropy is not below its floor."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(heads, 5, keys, generator=generator, dtype=torch.float64) * scale
    found = measure_heads(rows(logits))
    assert found is not None
    for values in (found.entropy, found.floor, found.sparsity):
        assert float(values.min()) >= -1e-12
        assert float(values.max()) <= 1 + 1e-12
    assert (found.entropy >= found.floor - 1e-9).all()
    assert heads == 1 or 0 <= float(found.diversity) <= 1


@given(st.floats(-50, 50), st.integers(0, 2**31))
def test_a_shift_of_a_row_changes_nothing_but_the_largest_logit(shift: float, seed: int) -> None:
    """Softmax does not see a constant, and neither does any quantity but the logit itself."""
    logits = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    before, after = measure_heads(rows(logits)), measure_heads(rows(logits + shift))
    assert before is not None
    assert after is not None
    for name in ("entropy", "floor", "sparsity", "diversity", "softness"):
        assert torch.allclose(getattr(before, name), getattr(after, name), atol=1e-9)
    assert torch.allclose(after.max_logit, before.max_logit + shift)


def test_hidden_keys_do_not_count() -> None:
    """Rows over some keys and a mask measure the same as rows over those keys alone."""
    torch.manual_seed(1)
    logits = torch.randn(2, 5, 9)
    visible = torch.zeros_like(logits, dtype=torch.bool)
    visible[..., :4] = True
    masked, alone = measure_heads(rows(logits, visible)), measure_heads(rows(logits[..., :4]))
    assert masked is not None
    assert alone is not None
    for name in ("entropy", "floor", "sparsity", "max_logit", "diversity"):
        assert torch.allclose(getattr(masked, name), getattr(alone, name), atol=1e-6), name


def test_padded_queries_do_not_count() -> None:
    """Rows that are not genuine change nothing."""
    torch.manual_seed(2)
    logits = torch.randn(1, 2, 6, 6)
    visible = torch.ones_like(logits, dtype=torch.bool)
    genuine = torch.tensor([[True, True, False, True, False, True]])
    found = measure_heads(AttentionRows(logits, visible, genuine))
    alone = measure_heads(AttentionRows(logits[:, :, genuine[0]], visible[:, :, genuine[0]], genuine[:, genuine[0]]))
    assert found is not None
    assert alone is not None
    assert torch.allclose(found.entropy, alone.entropy)
    assert found.num_rows == alone.num_rows == 4


def test_rows_that_see_one_key_are_nothing_to_measure() -> None:
    """Attention over a single key has no entropy to speak of."""
    assert measure_heads(rows(torch.zeros(2, 3, 1))) is None


def test_likeness_of_tokens() -> None:
    """Orthogonal tokens have cosine 0, equal ones 1, and a single one none; rank counts directions around the mean."""
    assert mean_cosine(torch.eye(6)) == pytest.approx(0, abs=1e-9)
    assert mean_cosine(torch.ones(6, 3)) == pytest.approx(1)
    assert math.isnan(mean_cosine(torch.ones(1, 3)))
    assert residual_and_rank(torch.eye(6))[1] == pytest.approx(5, abs=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_likeness_has_no_scale(scale: float) -> None:
    """Equal tokens have cosine 1 and no rank at any size, others what they have at size 1."""
    same = torch.full((5, 3), 0.1, dtype=torch.float64) * scale
    assert mean_cosine(same) == pytest.approx(1, abs=1e-12)
    assert residual_and_rank(same) == (0.0, 0.0)
    tokens = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert mean_cosine(tokens * scale) == pytest.approx(mean_cosine(tokens), rel=1e-9)
    assert residual_and_rank(tokens * scale) == pytest.approx(residual_and_rank(tokens), rel=1e-9)


def test_tokens_of_zero_have_no_direction() -> None:
    """The cosine is over the tokens that have one."""
    assert mean_cosine(torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]])) == pytest.approx(1)
    assert math.isnan(mean_cosine(torch.tensor([[1.0, 0.0], [0.0, 0.0]])))
    assert residual(torch.zeros(3, 2)) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_has_no_number(value: float) -> None:
    """A broken token or logit gives NaN instead of the number of a collapse; heads that are whole keep theirs."""
    tokens = torch.tensor([[value, 1.0], [2.0, 3.0], [1.0, 0.0]])
    assert all(map(math.isnan, (mean_cosine(tokens), *residual_and_rank(tokens))))
    logits = torch.tensor([[[value, 1.0, 0.0]], [[0.0, 1.0, 0.0]]])
    found, whole = measure_heads(rows(logits)), measure_heads(rows(logits[1:]))
    assert found is not None
    assert whole is not None
    for name in ("entropy", "floor", "sparsity", "softness"):
        broken, other = getattr(found, name).tolist()
        assert math.isnan(broken), name
        assert other == pytest.approx(getattr(whole, name).item()), name
    assert math.isnan(found.diversity)
    assert float(found.low_entropy) == pytest.approx(float(whole.low_entropy))
