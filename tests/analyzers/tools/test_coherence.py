"""How much consecutive gradients agree."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradtrack.analyzers.tools.spectra import GradientCoherence


def test_complex_gradients_agree_by_both_of_their_parts() -> None:
    """A gradient and i times it are at a right angle; twice the same points the same way."""
    model, coherence = nn.Linear(3, 2, bias=False, dtype=torch.complex128), GradientCoherence()
    gradient = torch.randn(2, 3, dtype=torch.complex128)
    for factor in (1, 1j, 2j):
        model.weight.grad = factor * gradient
        coherence.add(model)
    assert coherence.mean() == pytest.approx((0 + 1) / 2)


def test_sizes_do_not_matter() -> None:
    """From 1e-20 to 1e20 in float32 the cosine is that of the directions."""
    model, coherence = nn.Linear(2, 1, bias=False), GradientCoherence()
    for size, direction in ((1e-20, [3.0, 4.0]), (1e20, [4.0, 3.0])):
        model.weight.grad = size * torch.tensor([direction])
        coherence.add(model)
    assert coherence.mean() == pytest.approx(24 / 25)
