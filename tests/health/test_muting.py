"""What the analyzers find, from the callback to the end of the training, and what of it can be muted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrack import GradientManager, Issue, StepReport


class Net(nn.Module):
    """Rectified layers, and one that is not used."""

    def __init__(self, depth: int, dead: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.out, self.spare = nn.Linear(16, 3), nn.Linear(2, 2)
        for name, param in self.layers.named_parameters():
            if name in {f"{index}.bias" for index in dead}:
                nn.init.constant_(param[:14], -40.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of three classes."""
        for layer in self.layers:
            x = F.relu(layer(x))
        out: Tensor = self.out(x)
        return out


def broken() -> Net:
    """Return a network with a dead layer and an unused one."""
    return Net(4, (1,))


def train(manager: GradientManager, model: nn.Module, steps: int = 40) -> None:
    """Train on random labels."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    manager.attach(model, optimizer)
    for step in range(steps):
        x = torch.randn(48, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        manager.step(model, optimizer, F.cross_entropy(model(x), x[:, :3].argmax(-1)))
        optimizer.step()


def test_a_finding_can_stop_the_training() -> None:
    """A callback that raises on what an analyzer found ends the loop on that step, and the run keeps its report."""

    class Stop(Exception):
        pass

    def stop(issue: Issue, report: StepReport) -> None:
        raise Stop(f"{issue.key} at step {report.step}")

    with GradientManager(analyzers=["flow"], backends=["memory"]) as manager:
        manager.on_issue(stop)
        with pytest.raises(Stop, match=r"(DISCONNECTED:spare|DEAD:layers.1) at step"):
            train(manager, broken())
        assert manager.reports[-1].health.issues
        assert manager.reports[-1].step < 40


def test_a_finding_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A callback that logs hears of each finding when it opens, and not again."""
    import logging

    with GradientManager(backends=[], analyzers=["flow"]) as manager, caplog.at_level(logging.WARNING, "training"):
        manager.on_issue(lambda issue, report: logging.getLogger("training").warning(issue.key))
        train(manager, broken())
    assert sorted(caplog.messages) == ["DEAD:layers.1", "DISCONNECTED:spare"]


@pytest.mark.parametrize(
    ("mute", "left"),
    [
        ([], {"DEAD:layers.1", "DISCONNECTED:spare"}),
        (["DEAD"], {"DISCONNECTED:spare"}),
        (["disconnected"], {"DEAD:layers.1"}),
        (["spare"], {"DEAD:layers.1"}),
        (["DEAD:1$"], {"DISCONNECTED:spare"}),
        (["DEAD:2$", "VANISHING:1"], {"DEAD:layers.1", "DISCONNECTED:spare"}),
        (["DEAD", "DISCONNECTED"], set()),
    ],
)
def test_rules_and_layers_are_muted(mute: list[str], left: set[str]) -> None:
    """A rule, a layer or a rule at a layer that is muted is neither called back nor diagnosed."""
    heard: set[str] = set()
    with GradientManager(analyzers=["flow"], mute=mute) as manager:
        manager.on_issue(lambda issue, report: heard.add(issue.key))
        train(manager, broken())
        assert {issue.key for issue in manager.diagnose()} == left
    assert heard == left


def test_muted_findings_leave_room_for_others() -> None:
    """What is muted is left out before the diagnosis is cut to a handful."""
    with GradientManager(analyzers=["flow"], mute=["DEAD"]) as manager:
        train(manager, Net(7, tuple(range(7))))
        assert "DISCONNECTED:spare" in {issue.key for issue in manager.diagnose()}


def test_an_analyzer_that_is_asked_for_joins_those_that_were_chosen() -> None:
    """With `analyzers: auto` a policy can be observed though no module looks like one."""
    with GradientManager(analyzers="auto") as manager:
        train(manager, nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)), steps=2)
        observer: Any = manager.analyzer("rl_policy")
        observer.observe(torch.zeros(4, 3))
        assert manager.analyzer("rl_policy") is observer
