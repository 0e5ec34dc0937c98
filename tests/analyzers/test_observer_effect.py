"""Training beside all analyzers at once, looking at every step, is training without them."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch

from gradtrack import GradientManager
from tests.analyzers.every_step import NAMES, every_step
from tests.analyzers.watched_trainings import TRAININGS, train

__all__ = ["every_step"]

LOOKS = {
    "CNN": {"flow", "gain", "jacobian", "loss_graph", "precision", "updates", "vector"},
    "LSTM": {"flow", "gain", "jacobian", "precision", "recurrent", "updates", "vector"},
    "GPT": {"flow", "gain", "jacobian", "loss_graph", "precision", "transformer", "updates", "vector"},
    "policy": {"flow", "gain", "jacobian", "precision", "rl_policy", "updates", "vector"},
}


def analyzers() -> list[Any]:
    """Name every analyzer, with the parts that cost more switched on."""
    parts = {"enable_jacobian": True, "enable_vector_analysis": True}
    with_parts = {"flow", "recurrent", "rl_policy", "transformer"}
    return [{"name": name, **(parts if name in with_parts else {})} for name in NAMES]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("name", sorted(TRAININGS))
def test_fifty_steps_are_bitwise_equal(
    name: str, kind: type[torch.optim.Optimizer], every_step: None, caplog: pytest.LogCaptureFixture
) -> None:
    """O1: weights, buffers, gradients, moments and random states are the same, bit for bit, and all did look."""
    plain = train(name, GradientManager(max_grad_norm=0.5), kind)
    with caplog.at_level(logging.WARNING, "gradtrack"):
        manager = GradientManager(max_grad_norm=0.5, analyzers=analyzers())
        watched = train(name, manager, kind, watched=NAMES)
    assert len(watched) == len(plain)
    assert all(torch.equal(one, other) for one, other in zip(watched, plain, strict=True))
    assert "failed" not in caplog.text
    looks = Counter(found for report in manager.reports for found in report.analyzers)
    assert {found for found in looks if looks[found] >= 24} >= LOOKS[name]
    assert manager.reports[-1].clipping.clip_rate > 0


@pytest.mark.parametrize("analyzer", NAMES)
def test_each_analyzer_alone_leaves_fifty_steps_as_they_are(analyzer: str, every_step: None) -> None:
    """O1 for one analyzer, on a training that it reports on: what one moves no other can hide by moving it back."""
    name = next(name for name, looks in LOOKS.items() if analyzer in looks)
    plain = train(name, GradientManager(), torch.optim.Adam)
    (chosen,) = (one for one in analyzers() if one["name"] == analyzer)
    manager = GradientManager(analyzers=[chosen])
    watched = train(name, manager, torch.optim.Adam, watched=[analyzer])
    assert all(torch.equal(one, other) for one, other in zip(watched, plain, strict=True))
    assert sum(analyzer in report.analyzers for report in manager.reports) >= 24
