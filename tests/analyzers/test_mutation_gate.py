"""The gate: each of the naive versions that people write first must fail at least one golden value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradtrack.analyzers.recurrent import dynamics, measure, trajectories
from gradtrack.analyzers.transformer import recorder, statistics
from gradtrack.analyzers.vector.field import FieldSamples
from tests.analyzers.recurrent import recurrent_goldens
from tests.analyzers.recurrent.test_mutations import direct_gradients, rayleigh_alone, spectrum_of_the_weights
from tests.analyzers.transformer import test_transformer
from tests.analyzers.transformer.test_mutations import ln_of_all_keys, returned_weights
from tests.analyzers.transformer.test_recorder import heard
from tests.analyzers.vector.test_mutations import raw_rotation, temporal_difference_golden


def weights_before_dropout() -> None:
    """A6: in train mode too, the entropy is that of the weights which torch returns without dropout."""
    module, tokens = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True), torch.randn(2, 7, 16)
    weights = module.eval()(tokens, tokens, tokens, average_attn_weights=False)[1]
    expected = torch.special.entr(weights).sum(-1).mean((0, 2)) / math.log(7)
    module.train()
    (found,) = heard(module, lambda: module(tokens, tokens, tokens, need_weights=False)).heads[""]
    assert torch.allclose(found.entropy.double(), expected.double(), atol=1e-6)


NAIVE: dict[str, tuple[object, str, Any, Callable[[], object]]] = {
    "eigenvalues of weight_hh": (measure, "step_spectrum", spectrum_of_the_weights, recurrent_goldens.r4_gru),
    "output.grad for dL/dh": (
        trajectories,
        "_differentiate",
        direct_gradients,
        recurrent_goldens.r11_gradients_through_time,
    ),
    "Rayleigh power iteration": (dynamics, "arnoldi", rayleigh_alone, recurrent_goldens.r10_complex_pair),
    "ln T for ln visible": (
        statistics,
        "normalized_entropy",
        ln_of_all_keys,
        test_transformer.test_uniform_causal_attention_through_the_analyzer,
    ),
    "need_weights=True": (
        recorder,
        "rows_of_attention",
        returned_weights,
        weights_before_dropout,
    ),
    "raw norm of the antisymmetric part": (
        FieldSamples,
        "rotation",
        property(raw_rotation),
        temporal_difference_golden,
    ),
}


@pytest.mark.parametrize("name", NAIVE)
def test_the_naive_version_fails_its_golden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is the golden holds; with the naive version in place it does not."""
    home, attribute, naive, golden = NAIVE[name]
    torch.manual_seed(0)
    golden()
    monkeypatch.setattr(home, attribute, naive)
    torch.manual_seed(0)
    with pytest.raises(AssertionError):
        golden()
