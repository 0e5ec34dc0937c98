"""Samples of a training: that a resumed run is judged as one that never stopped, and what the first step shows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrack import GradientManager, Issue


def perceptron(bias: float = 0.0) -> nn.Sequential:
    """Return a rectified network, with a bias on its middle layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    nn.init.constant_(model[2].bias, bias)  # type: ignore[arg-type]
    return model


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return the loss of a step's batch."""
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(x), x[:, :3].argmax(-1))


def go(manager: GradientManager, model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    """Train from one step to another."""
    manager.attach(model, optimizer)
    for step in range(first, last + 1):
        optimizer.zero_grad()
        manager.step(model, optimizer, loss_of(model, step))
        optimizer.step()


def shown(issues: list[Issue]) -> list[tuple[str, int, float | None]]:
    """Return what must be the same in two diagnoses."""
    return [(issue.key, issue.step, issue.value) for issue in issues]


@pytest.mark.parametrize("cut", [6, 14, 30, 38])
def test_a_resumed_run_has_the_same_diagnosis(cut: int, tmp_path: Path) -> None:
    """The windows of a run that is saved, loaded elsewhere and continued are those of a run in one go."""
    model = perceptron(-50.0)
    whole, halves = copy.deepcopy(model), model
    with GradientManager(analyzers=["flow"]) as manager:
        go(manager, whole, torch.optim.SGD(whole.parameters(), 0.1), 1, 40)
        expected = manager.diagnose()
    with GradientManager(analyzers=["flow"]) as first:
        go(first, halves, torch.optim.SGD(halves.parameters(), 0.1), 1, cut)
        torch.save(first.state_dict(), tmp_path / "state.pt")
    with GradientManager(analyzers=["flow"]) as second:
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        optimizer = torch.optim.SGD(halves.parameters(), 0.1)
        second.attach(halves, optimizer)
        assert shown(second.diagnose()) == shown(first.diagnose())
        go(second, halves, optimizer, cut + 1, 40)
        found = second.diagnose()
    assert shown(found) == shown(expected)
    assert "DEAD:2" in {issue.key for issue in found}


def test_a_fault_that_did_harm_before_a_checkpoint_is_known_after_it() -> None:
    """A step of NaN is still in the diagnosis of a run that was resumed."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = GradientManager(analyzers=["flow"])
    go(first, model, optimizer, 1, 5)
    optimizer.zero_grad()
    first.step(model, optimizer, loss_of(model, 6) * torch.nan)
    go(first, model, optimizer, 7, 9)
    state = first.state_dict()
    first.close()
    with GradientManager(analyzers=["flow"]) as second:
        second.load_state_dict(state)
        go(second, model, optimizer, 10, 12)
        assert [issue.key for issue in second.diagnose()] == ["NUMERICAL"]


def test_the_first_step_is_seen_without_attaching() -> None:
    """A first step that leaves nothing of the weights is named, though no hook was there for it."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 1e4)
    with GradientManager(analyzers=["flow"], enable_gradient_clipping=False) as manager:
        for step in range(20):
            optimizer.zero_grad()
            manager.step(model, optimizer, loss_of(model, step))
            optimizer.step()
        issue = manager.diagnose()[0]
    assert (issue.issue_type.value, issue.step) == ("LR_TOO_HIGH", 1)
    assert issue.explained_by is None


def test_few_samples_are_kept() -> None:
    """However long a run is, only its first and its last samples stay, and units only of the last ones."""
    model = perceptron()
    with GradientManager(analyzers=["flow"]) as manager:
        go(manager, model, torch.optim.SGD(model.parameters(), 0.01), 1, 64 + 20 * 64)
        analyzer: Any = manager.analyzer("flow")
        samples = analyzer.case.samples
    assert len(samples) <= 32
    assert samples[0].step == 1
    assert sum(any(node.unit_max is not None for node in sample.nodes) for sample in samples) <= 3


class Spectral(nn.Module):
    """A complex layer before a rectified head."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.head = perceptron(bias)
        self.first = nn.Linear(8, 8, dtype=torch.cfloat)
        self.gradients: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Run both, and keep the gradient that comes to the complex part."""
        inner: Tensor = self.first(x.to(torch.cfloat))
        inner.register_hook(self.gradients.append)  # type: ignore[no-untyped-call]
        head: Tensor = self.head(inner.abs())
        return head


def test_the_dead_head_of_a_complex_layer_is_found() -> None:
    """A complex layer hides no fault of the others, and is not said to be cut off itself."""
    model = Spectral(-50.0)
    with GradientManager(analyzers=["flow"]) as manager:
        go(manager, model, torch.optim.SGD(model.parameters(), 0.1), 1, 40)
        found = {issue.key for issue in manager.diagnose()}
    assert found == {"DEAD:head.2"}


def test_the_steps_of_a_complex_layer_are_followed() -> None:
    """Its norm, its change and its gradients are those of its real and imaginary parts."""
    model = Spectral()
    weight = model.first.weight
    before = weight.detach().clone()
    with GradientManager(analyzers=["flow"], enable_gradient_clipping=False) as manager:
        go(manager, model, torch.optim.SGD(model.parameters(), 0.1), 1, 1)
        after = weight.detach().clone()
        go(manager, model, torch.optim.SGD(model.parameters(), 0.1), 2, 12)
        analyzer: Any = manager.analyzer("flow")
    sample = analyzer.case.samples[0]
    assert sample.params["first.weight"].weight == pytest.approx(float(before.abs().square().sum().sqrt()))
    moved = float((after - before).abs().square().sum().sqrt())
    assert sample.changes["first.weight"].ratio * float(after.abs().square().sum().sqrt()) == pytest.approx(moved, 0.05)
    assert analyzer.case.samples[1].clip == pytest.approx(1.0)
    assert -1.0 <= sample.cosine <= 1.0
    node = next(node for node in sample.nodes if node.name == "first")
    assert node.delta == pytest.approx(float(model.gradients[0].abs().square().sum().sqrt()))


def test_a_loss_scale_that_was_being_found_is_no_fault_afterwards() -> None:
    """A scaler may overflow on its first steps, which the first samples see; one that never ends is told."""
    for num_overflows, expected in ((4, []), (40, ["NUMERICAL"])):
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu")
        manager = GradientManager(analyzers=["flow"])
        manager.attach(model, optimizer)
        for step in range(1, 41):
            optimizer.zero_grad()
            loss = loss_of(model, step) * (1e39 if step <= num_overflows else 1.0)
            manager.step(model, optimizer, loss, scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
        assert [issue.issue_type.value for issue in manager.diagnose()][:1] == expected
