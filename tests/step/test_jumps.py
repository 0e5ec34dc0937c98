"""Change detection: which jumps of norm and loss make the analyzers run, and which do not."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradtrack import GradientManager
from gradtrack.analyzers.base import Snapshot
from gradtrack.analyzers.flow import GradientFlowAnalyzer
from gradtrack.step.judge import Jump


def noisy(count: int, seed: int = 0, spread: float = 0.2) -> list[float]:
    """Return logarithms of norms that vary by chance."""
    source = random.Random(seed)
    return [source.gauss(0, spread) for _ in range(count)]


def jumps(log_norms: Sequence[float], losses: Sequence[float] | None = None) -> list[int]:
    """Return the steps, counted from 0, at which a run is found to have jumped."""
    jump = Jump()
    known = [None] * len(log_norms) if losses is None else losses
    return [step for step, (norm, loss) in enumerate(zip(log_norms, known, strict=True)) if jump.update(norm, loss)]


@pytest.mark.parametrize("height", [3.0, -3.0])
def test_a_new_level_is_told_on_its_second_step(height: float) -> None:
    """A norm that goes up or down and stays there is told at once, and only once."""
    assert jumps([*noisy(100), *(height + value for value in noisy(200, seed=1))]) == [101]


def test_a_loss_that_jumps_is_told() -> None:
    """A loss that doubles and stays there is told, with a norm that does not change."""
    losses = [math.exp(value) for value in noisy(200, spread=0.05)]
    assert jumps(noisy(200, seed=1), [*losses[:120], *(2 * loss for loss in losses[120:])]) == [121]


def test_one_step_alone_is_not_told() -> None:
    """A single batch that is out of line is no new level."""
    assert jumps([*noisy(100), 5.0, *noisy(100, seed=1)]) == []


@given(st.integers(0, 1000))
def test_looking_gets_rare(seed: int) -> None:
    """Whatever a run does, it is not told more than seven times in 2,000 steps."""
    source = random.Random(seed)
    assert len(jumps([source.choice([0.0, 0.0, 9.0]) * step for step in range(2000)])) <= 7


@given(st.integers(1, 199), st.integers(0, 100))
def test_state_continues(cut: int, seed: int) -> None:
    """What is told after a checkpoint is what would have been told without one."""
    log_norms = [*noisy(100, seed), *(3 + value for value in noisy(100, seed + 1))]
    whole, first, second = Jump(), Jump(), Jump()
    expected = [whole.update(value, math.exp(value)) for value in log_norms]
    found = [first.update(value, math.exp(value)) for value in log_norms[:cut]]
    second.load_state_dict(first.state_dict())
    assert found + [second.update(value, math.exp(value)) for value in log_norms[cut:]] == expected


def _steps(
    steps: int, break_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[tuple[int, str]]]:
    """Train a network whose first layer dies at a step; return the steps of its samples and what was opened when."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    looked, opened = [], []
    inspect = GradientFlowAnalyzer.inspect

    def seen(self: GradientFlowAnalyzer, snapshot: Snapshot) -> object:
        report = inspect(self, snapshot)
        if report is not None:
            looked.append(snapshot.step)
        return report

    monkeypatch.setattr(GradientFlowAnalyzer, "inspect", seen)
    with GradientManager(analyzers=["flow"], enable_gradient_clipping=False) as manager:
        manager.on_issue(lambda issue, _: opened.append((issue.step, issue.key)))
        for step in range(1, steps + 1):
            if step == break_at:
                nn.init.constant_(model[0].bias, -100.0)  # type: ignore[arg-type]
            x = torch.randn(32, 4)
            optimizer.zero_grad()
            manager.step(model, optimizer, (model(x) - 3 * x.sum(1, keepdim=True)).square().mean())
            optimizer.step()
    return looked, opened


def test_a_fault_between_rare_verdicts_is_named_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that dies at step 150 is named within twenty steps, though the next verdict would be at step 512."""
    _, opened = _steps(200, 150, monkeypatch)
    assert any(150 <= step <= 170 and key == "DEAD:0" for step, key in opened)


def test_a_healthy_run_is_looked_at_no_more_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that happens in a sound run adds a sample."""
    looked, opened = _steps(300, None, monkeypatch)
    assert opened == []
    assert looked == [*range(4, 65, 4), 128, 192, 256]
