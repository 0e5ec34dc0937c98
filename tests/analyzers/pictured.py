"""Short trainings under an analyzer, and what its picture is drawn from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradtrack import GradientManager, RLPolicyAnalyzer, StepReport
from gradtrack.drawing import figures
from gradtrack.pages.pictures import pictures_of


def train(model: nn.Module, analyzer: Any, inputs: Callable[[], torch.Tensor]) -> list[StepReport]:
    """Train for nine steps and return the reports."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager = GradientManager(analyzers=[analyzer])
    manager.attach(model, optimizer, horizon=7)
    for _ in range(9):
        optimizer.zero_grad()
        output = model(inputs())
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(analyzer, RLPolicyAnalyzer):
            analyzer.observe(output, episode_return=3.0)
        manager.step(model, optimizer, output.square().mean())
        optimizer.step()
    return manager.reports


def drawn(reports: list[StepReport], name: str, module: Any, plot: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what a picture is drawn from."""
    calls: list[Any] = []

    def keep(*values: Any, **options: Any) -> Path:
        calls.append((*values, options))
        return Path()

    monkeypatch.setattr(module, plot, keep)
    monkeypatch.setattr(figures, "save", lambda _, path: path)
    pictures_of(reports, [])[name](Path("picture.png"))
    (call,) = calls
    return call
