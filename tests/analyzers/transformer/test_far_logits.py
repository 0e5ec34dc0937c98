"""Logits so far apart that a row sees one key are a collapse, and no NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gradtrack import GradientManager
from gradtrack.analyzers.transformer.report import AttentionReport


class Attention(nn.Module):
    """Attention by hand with two heads, of which the second has its scores multiplied."""

    def __init__(self, factor: float, both: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.factor: Tensor
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 3)
        self.register_buffer("factor", torch.tensor([factor if both else 1.0, factor]).view(1, 2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all positions."""
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = (query @ key.transpose(-2, -1) * self.factor).softmax(-1)
        found: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2).mean(1))
        return found


@pytest.mark.parametrize("both", [False, True])
def test_finite_logits_are_never_said_to_be_nan(both: bool) -> None:
    """A head of whose rows none sees two keys is left out of the means; the others are those of its layer."""
    model = Attention(1e6, both)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with GradientManager(analyzers=["transformer"], backends=[]) as manager:
        for _ in range(12):
            x = torch.randn(4, 6, 16)
            optimizer.zero_grad()
            report = manager.step(model, optimizer, nn.functional.cross_entropy(model(x), x[:, 0, :3].argmax(1)))
            optimizer.step()
            found = report.analyzers.get("transformer")
            layers = found.layers if isinstance(found, AttentionReport) else []
            assert all(math.isfinite(layer.entropy_mean) for layer in layers)
        kinds = {issue.issue_type.value for issue in manager.diagnose()}
    assert "NUMERICAL" not in kinds
