"""The gains of a model's blocks while it trains."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrack import GradientGainMonitor, GradientManager
from gradtrack.analyzers.gain import GainAnalyzer, GainReport


def deep_model(depth: int = 5, gain: float = 0.5) -> Any:
    """Return orthogonal layers with one gain."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(depth))).double()
    for layer in model:
        assert isinstance(layer, nn.Linear)
        nn.init.orthogonal_(layer.weight, gain=gain)
    return model


def steps(manager: GradientManager, model: Any, count: int, micro_batches: int = 1) -> list[Any]:
    """Train for some steps with a rate of zero."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(3, 8)
    reports = []
    for _ in range(count):
        for _ in range(micro_batches - 1):
            manager.step(model, optimizer, model(batch).square().sum(), accumulate=True)
        reports.append(manager.step(model, optimizer, model(batch).square().sum()))
    return reports


@pytest.mark.parametrize("depth", [4, 25])
def test_orthogonal_layers_have_their_gain(depth: int) -> None:
    """G1: in a stack of 1.1 times orthogonal layers every gain is 1.1, to 1e-12."""
    model = deep_model(depth, 1.1)
    with GradientGainMonitor(model) as monitor:
        model(torch.ones(3, 8, dtype=torch.float64)).sum().backward()
    assert monitor.gains() == pytest.approx([1.1] * (depth - 1), abs=1e-12)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_report_of_a_live_model_is_that_of_the_monitor(micro_batches: int) -> None:
    """On a due step the gains are those that a monitor around the same pass reads, under accumulation too."""
    model = deep_model(gain=0.7)
    with GradientGainMonitor(model) as monitor:
        batch = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(3, 8)
        model(batch).square().sum().backward()
    model.zero_grad()
    reports = steps(GradientManager(analyzers=["gain"]), model, 4, micro_batches)
    assert [list(report.analyzers) for report in reports] == [[], [], [], ["gain"]]
    found = reports[-1].analyzers["gain"]
    assert isinstance(found, GainReport)
    assert found.gains == pytest.approx(monitor.gains())
    assert found.blocks == ["0", "1", "2", "3", "4"]
    assert found.cumulative_gain == pytest.approx(0.7**4)
    assert found.gain_per_block == pytest.approx(0.7)
    assert found.num_samples == 3


def test_its_numbers_go_to_the_trackers() -> None:
    """Every metric of the panels is in the row of the step."""
    manager = GradientManager(backends=["memory"], analyzers=["gain"])
    report = steps(manager, deep_model(), 4)[-1]
    records: list[Any] = manager.backend("memory").records  # type: ignore[attr-defined]
    named = {name for panel in GainAnalyzer.panels for name in panel.metrics}
    assert named <= set(records[-1].metrics)
    assert records[-1].step == 4
    assert {name for name in report.metrics() if name.startswith("gain/")} >= named
    assert all(math.isfinite(value) for value in records[-1].metrics.values())


def test_no_hook_stays_between_its_steps() -> None:
    """After a step that is not followed by a due one the model carries no hook."""
    model = deep_model()
    manager = GradientManager(analyzers=["gain"])
    for step, report in enumerate(steps(manager, model, 9), start=1):
        assert ("gain" in report.analyzers) == (step % 4 == 0)
    assert not any(module._forward_hooks for module in model.modules())
    manager.close()


def test_the_jump_is_named() -> None:
    """The block where the gain is out of line is in the report."""
    model = deep_model(8, 1.0)
    with torch.no_grad():
        model[4].weight.mul_(100)
    found = steps(GradientManager(analyzers=["gain"]), model, 4)[-1].analyzers["gain"]
    assert found.jump_at == "3"
    assert found.jump == pytest.approx(math.log(100), rel=1e-6)


def test_blocks_can_be_chosen() -> None:
    """The option takes names or a regular expression."""
    manager = GradientManager(analyzers=[{"name": "gain", "blocks": "[024]"}])
    assert steps(manager, deep_model(), 4)[-1].analyzers["gain"].blocks == ["0", "2", "4"]


def test_a_model_without_a_chain_is_told_so() -> None:
    """Where there is nothing to look at, a note says what to do and training goes on."""
    reports = steps(GradientManager(analyzers=["gain"], max_grad_norm=1.0), deep_model(2), 12)
    assert not any(report.analyzers for report in reports)
    (note,) = [note for report in reports for note in report.notes]
    assert "no chain of three or more blocks" in note


@pytest.mark.parametrize("place", ["wrapped", "in place"])
def test_a_compiled_model_has_the_gains_of_the_plain_one(place: str) -> None:
    """The steps at which the analyzer looks run eagerly, also where a whole model is compiled."""
    model: Any = deep_model()
    compiled: Any = torch.compile(model, backend="eager") if place == "wrapped" else model
    if place == "in place":
        model.compile(backend="eager")
    found = []
    for one in (compiled, deep_model()):
        manager = GradientManager(analyzers=["gain"], max_grad_norm=1.0)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.0)
        manager.attach(one, optimizer)
        reports = [manager.step(one, optimizer, one(torch.ones(3, 8, dtype=torch.float64)).sum()) for _ in range(8)]
        found.append([{k: v for k, v in report.metrics().items() if "gain" in k} for report in reports])
        manager.close()
    assert any(found[0])
    assert found[0] == found[1]
    torch._dynamo.reset()


def test_evaluation_is_no_evidence() -> None:
    """A forward pass without a backward pass, after the one that counts, changes nothing."""
    model = deep_model()
    manager = GradientManager(analyzers=["gain"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = torch.ones(3, 8, dtype=torch.float64)
    report: Any = None
    for _ in range(4):
        loss = model(batch).sum()
        loss.backward()
        with torch.no_grad():
            model(batch)
        model(batch * 100)
        report = manager.step(model, optimizer, loss, backward=False)
    assert report.analyzers["gain"].gain_per_block == pytest.approx(0.5)


def test_it_suits_models_with_a_chain() -> None:
    """The automatic choice gives its reason."""
    assert GainAnalyzer.suits(deep_model()) == "the model has a chain of 5 Linear blocks, 0 to 4"
    assert GainAnalyzer.suits(nn.Linear(2, 2)) is None


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_the_scale_of_the_loss_changes_no_metric(scale: float) -> None:
    """F1: every metric is the same at another scale of the loss."""
    found = []
    for factor in (1.0, scale):
        model = deep_model(gain=0.9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        manager = GradientManager(analyzers=["gain"])
        batch: Tensor = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(3, 8)
        for _ in range(4):
            report = manager.step(model, optimizer, factor * model(batch).square().sum())
        found.append(report.analyzers["gain"].metrics())  # type: ignore[union-attr]
    assert found[0] == pytest.approx(found[1], rel=1e-12, abs=1e-12)


def test_a_block_without_inputs_in_a_batch() -> None:
    """An expert that no row of a batch was sent to has an empty gradient, which never stops the training."""
    blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    with GradientGainMonitor(blocks) as monitor:
        x = torch.randn(3, 4)
        torch.autograd.backward(blocks[0](x).sum() + blocks[1](blocks[0](x)[:0]).sum())
        monitor.norms()


class Experts(nn.Module):
    """Blocks side by side, of which each gets the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Add up what they return."""
        return torch.stack([expert(x) for expert in self.experts]).sum(0)


def test_blocks_side_by_side_are_no_chain() -> None:
    """Where no block takes the output of another one, no gain is made up and a note says what to name."""
    reports = steps(GradientManager(analyzers=["gain"], max_grad_norm=1.0), Experts(), 12)
    assert reports[-1].analyzers["gain"].gains == [None] * 3
    (note,) = [note for report in reports for note in report.notes]
    assert "experts side by side" in note
    assert "blocks=" in note
