"""The golden values catch the naive versions: each of them, put in place, breaks at least one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradtrack.analyzers.rl_policy import entropy, history, observation
from gradtrack.analyzers.transformer import interception, logits, recorder, statistics
from tests.analyzers.rl_policy import test_entropy, test_history, test_rl_policy, test_update_metrics
from tests.analyzers.transformer import test_recorder, test_statistics, test_transformer
from tests.analyzers.transformer.attention_models import ImportedAttention

Golden = Callable[[], None]


def ln_of_all_keys(nats: Tensor, count: Tensor) -> Tensor:
    """Divide by ln of the whole length, which the last of causal rows sees, as if every key could be seen."""
    return nats / math.log(int(count.max()))


def near_zero(weights: Tensor, count: Tensor) -> Tensor:
    """Count weights below a fixed limit."""
    return (weights < 1e-2).sum(-1) / count


def variance_of_heads(weights: Tensor, nats: Tensor, count: Tensor) -> Tensor:
    """Take the variance over heads."""
    return weights.var(-3, unbiased=False).sum(-1)


def uncentred(rows: Tensor) -> Tensor:
    """Leave the mean in."""
    return rows


def loose_floor(spread: Tensor, count: Tensor) -> Tensor:
    """Forget the factor sqrt(T/(T-1))."""
    others = count.to(spread.dtype) - 1
    odds = others * torch.exp(-spread)
    return torch.log1p(odds) + odds * spread / (1 + odds)


def entropy_of_the_gaussian(mean: Tensor, std: Tensor) -> Tensor:
    """Forget what tanh does."""
    return entropy.normal_entropy(std + 0 * mean)


def all_actions(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Divide by ln of all actions, allowed or not."""
    probs = torch.special.entr(log_probs.exp()).sum(-1)
    return probs, torch.full_like(probs, math.log(log_probs.shape[-1]))


def ratio_of_differential_entropy(std: Tensor, width: Any) -> Tensor:
    """Divide a differential entropy by ln of the range."""
    return entropy.normal_entropy(std) / torch.as_tensor(width).log()


def returned_weights(*args: Any, **kwargs: Any) -> statistics.AttentionRows:
    """Take what a module returns when it is asked for its weights: in train mode those after dropout."""
    rows = logits.rows_of_attention(*args, **kwargs)
    assert rows is not None
    returned = nn.functional.dropout(statistics.weights_of(rows.masked), 0.5)
    return statistics.AttentionRows(returned.log(), rows.visible & (returned > 0), rows.genuine)


MUTANTS: dict[str, tuple[object, str, Any, Golden]] = {
    "ln T for ln visible": (
        statistics,
        "normalized_entropy",
        ln_of_all_keys,
        test_statistics.test_uniform_causal_attention_is_fully_uncertain,
    ),
    "ln T for ln visible, in the analyzer": (
        statistics,
        "normalized_entropy",
        ln_of_all_keys,
        test_transformer.test_uniform_causal_attention_through_the_analyzer,
    ),
    "near zero for sparse": (
        statistics,
        "sparsity",
        near_zero,
        test_statistics.test_uniform_attention_is_neither_sparse_nor_diverse,
    ),
    "variance for diversity": (
        statistics,
        "head_diversity",
        variance_of_heads,
        test_statistics.test_heads_that_share_no_key_are_fully_diverse,
    ),
    "norm for residual": (
        statistics,
        "centred",
        uncentred,
        lambda: test_statistics.test_rank_residual_of_known_tokens(4),
    ),
    "loose entropy floor": (
        test_statistics,
        "entropy_floor",
        loose_floor,
        lambda: test_statistics.test_entropy_floor_is_reached_and_never_broken(4, 2.0),
    ),
    "Gaussian entropy for tanh": (
        test_entropy,
        "tanh_normal_entropy",
        entropy_of_the_gaussian,
        test_entropy.test_tanh_of_a_gaussian_is_most_random_in_between,
    ),
    "ln of all actions for allowed ones": (
        test_entropy,
        "categorical_entropy",
        all_actions,
        test_entropy.test_entropy_of_known_categoricals,
    ),
    "ln of all actions, in the analyzer": (
        observation,
        "categorical_entropy",
        all_actions,
        lambda: test_rl_policy.test_uniform_actions_have_all_of_their_entropy("masked"),
    ),
    "a ratio of differential entropies": (
        observation,
        "effective_range",
        ratio_of_differential_entropy,
        test_rl_policy.test_a_gaussian_in_its_range,
    ),
    "k1 for k3": (
        test_update_metrics,
        "kl_estimates",
        lambda log_ratio: type("Estimates", (), {"k3": float(log_ratio.mean()), "k1": 0.0})(),
        test_update_metrics.test_divergence_of_two_gaussians,
    ),
    "a least-squares slope for Theil-Sen": (
        test_entropy,
        "theil_sen",
        lambda values: float((values[-1] - values[0]) / max(len(values) - 1, 1)) + max(values) / 1e4,
        test_entropy.test_theil_sen_ignores_an_outlier,
    ),
    "level without returns": (
        history.PolicyHistory,
        "pays",
        None,
        test_history.test_a_solved_task_may_be_deterministic,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_naive_version_breaks_a_golden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden passes as it is and fails once the naive version is in place."""
    home, attribute, mutant, golden = MUTANTS[name]
    torch.manual_seed(0)
    golden()
    monkeypatch.setattr(home, attribute, mutant)
    torch.manual_seed(0)
    with pytest.raises(AssertionError):
        golden()


def test_returned_weights_are_not_probabilities() -> None:
    """What torch returns with need_weights in train mode differs from what the recorder takes."""
    module, tokens = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True), torch.randn(2, 7, 16)
    returned = module(tokens, tokens, tokens, need_weights=True, average_attn_weights=False)[1]
    assert not torch.allclose(returned.sum(-1), torch.ones(()), atol=1e-2)


def test_a_mode_alone_misses_multi_head_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rebinding, attention inside of torch's own multi-head attention is not seen: one call becomes none."""
    test_recorder.test_weights_equal_those_that_torch_returns(monkeypatch, False)
    monkeypatch.setattr(interception, "_REBOUND", ())
    with pytest.raises((AssertionError, IndexError)):
        test_recorder.test_weights_equal_those_that_torch_returns(monkeypatch, False)


def test_rebinding_alone_misses_imported_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mode, attention through an imported name is not seen."""
    kind = ImportedAttention
    test_recorder.test_imported_names_and_written_out_softmax_are_heard_once(kind)
    monkeypatch.setattr(interception._Mode, "__torch_function__", TorchFunctionMode.__torch_function__)
    monkeypatch.setattr(interception.Interception, "see_imported", lambda *_: None)
    with pytest.raises(AssertionError):
        test_recorder.test_imported_names_and_written_out_softmax_are_heard_once(kind)


def test_a_mode_that_stays_on_takes_encoders_off_their_fused_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mode on inside of torch's own layers, the fused kernel is not chosen any more."""
    test_recorder.test_fused_kernels_are_still_chosen(monkeypatch)
    monkeypatch.setattr(recorder, "_FUSED", ())
    with pytest.raises(AssertionError):
        test_recorder.test_fused_kernels_are_still_chosen(monkeypatch)
