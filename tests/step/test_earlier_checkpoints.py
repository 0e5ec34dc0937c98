"""Checkpoints of earlier versions load, and the training goes on as it would have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradtrack import GradientManager
from tests.training import small_model

STATE = Path(__file__).parent.parent / "delivery" / "journal" / "earlier" / "state.json"
"""What `state_dict` of version 0.1.0 returned after 91 quiet steps."""


def train(manager: GradientManager, steps: int) -> Any:
    """Train quietly, as the training did of which the state is, and return the last report."""
    model, report = small_model(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(step % 8))
        report = manager.step(model, optimizer, (model(inputs) - 1.0).square().mean())
        optimizer.step()
    return report


def test_a_state_of_version_0_1_0_loads() -> None:
    """Steps go on where they were, the sums are those of then, and nothing opens."""
    manager = GradientManager()
    manager.load_state_dict(json.loads(STATE.read_text(encoding="utf-8")))
    report = train(manager, 40)
    assert report.step == 91 + 40
    assert report.health.healthy
    assert manager.get_training_summary().total_steps == 91 + 40


def test_the_state_has_the_keys_that_it_had() -> None:
    """The state of this version has all keys of the earlier one at the same step, and the same norms."""
    manager = GradientManager(engine="native", grad_track_per_weight_matrix=False)
    train(manager, 91)
    then, now = json.loads(STATE.read_text(encoding="utf-8")), json.loads(json.dumps(manager.state_dict()))
    assert _shape(now, then) == _shape(then, then)
    np.testing.assert_allclose(now["history"]["norms"], then["history"]["norms"], rtol=1e-6)
    spike = [state["pairs"][""]["monitor"]["health"]["spike"] for state in (now, then)]
    np.testing.assert_allclose(spike[0]["window"], spike[1]["window"], rtol=1e-6)


def _shape(state: Any, known: Any) -> Any:
    if isinstance(state, dict):
        return {key: _shape(state.get(key), value) for key, value in sorted(known.items())}
    return len(state) if isinstance(state, list) else type(state).__name__
