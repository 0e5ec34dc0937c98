"""A training that goes on from a checkpoint is judged like one that never stopped."""

from __future__ import annotations

import pickle

import torch
from torch import nn

from gradtrack import GradientManager, Issue, StepReport, safe_backward


class Training:
    """A network whose second layer is dead, under a manager that looks for it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        dead = nn.Linear(32, 32)
        nn.init.constant_(dead.bias, -50.0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), dead, nn.ReLU(), nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.manager = GradientManager(analyzers="auto")
        self.manager.attach(self.model, self.optimizer)
        self.opened: list[Issue] = []
        self.manager.on_issue(lambda issue, report: self.opened.append(issue))

    def go(self, steps: int) -> list[StepReport]:
        """Train on."""
        reports = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = (self.model(torch.randn(16, 8)) - 1).square().mean()
            reports.append(safe_backward(loss, self.model, self.optimizer, self.manager))
            self.optimizer.step()
        return reports


def test_what_analyzers_found_stays_open_over_a_checkpoint() -> None:
    """The resumed run is as unhealthy as before, between two looks of its analyzers too, and opens nothing again."""
    first = Training()
    assert not first.go(140)[-1].health.healthy
    second = Training()
    second.model.load_state_dict(first.model.state_dict())
    second.manager.load_state_dict(pickle.loads(pickle.dumps(first.manager.state_dict())))
    assert {report.health.healthy for report in second.go(40)} == {False}
    assert [issue.key for issue in first.opened] == [issue.key for issue in first.manager.reports[-1].health.issues]
    assert second.opened == []
