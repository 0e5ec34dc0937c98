"""The analyzer of the loss: each fault is found at its layer, at the first look, and nothing else is."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradtrack import GradientManager, watch
from gradtrack.reports import Issue
from tests.analyzers.loss_graph.programs import BATCH, FAULTY, HEALTHY, OF_VALUES, Network, Program, targets_of


def train(program: Program, num_steps: int = 2, manager: GradientManager | None = None) -> list[Issue]:
    """Train with a program's loss, and return the issues that its graph shows."""
    torch.manual_seed(0)
    model = Network(program.head())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, target = torch.randn(BATCH, 4), targets_of(program)
    with manager or GradientManager(analyzers=["loss_graph"]) as manager:
        for _ in range(num_steps):
            optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of torch, about some of the broadcasts
                loss = program.loss(model(x), target)
            manager.step(model, optimizer, loss)
            optimizer.step()
        return [issue for issue in manager.diagnose() if issue.issue_type.value in KINDS]


KINDS = {program.kind for program in FAULTY.values()}


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_named_with_its_layer(name: str) -> None:
    """The first look finds the kind of fault and its place, and no second fault."""
    program = FAULTY[name]
    assert [(issue.issue_type.value, issue.layer) for issue in train(program)] == [(program.kind, program.layer)]


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("name", FAULTY)
def test_the_loss_of_a_watched_loop_is_read_as_well(name: str, accumulated: bool) -> None:
    """A loop that passes no loss runs its own backward pass, from which the graph is known, but no targets."""
    program, model = FAULTY[name], Network(FAULTY[name].head())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, target, total = torch.randn(BATCH, 4), targets_of(program), 0.0
    with watch(model, optimizer, analyzers=["loss_graph"]) as manager:
        for _ in range(2):
            optimizer.zero_grad()
            total = 0.0
            for _ in range(1 + accumulated):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    loss = program.loss(model(x), target)
                torch.autograd.backward(loss)
                total += loss.item()
                with torch.no_grad():
                    loss.zero_()  # what the loop does with it then is its own affair
            optimizer.step()
        found = [issue for issue in manager.diagnose() if issue.issue_type.value in KINDS]
        assert manager.reports[-1].loss == pytest.approx(total, rel=1e-6)
    expected = [] if name in OF_VALUES else [(program.kind, program.layer)]
    assert [(issue.issue_type.value, issue.layer) for issue in found] == expected


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loss_is_left_alone(name: str) -> None:
    """Losses that look alike have no issue."""
    assert train(HEALTHY[name]) == []


def test_each_kind_has_a_program() -> None:
    """There are at least twenty programs with a fault and twenty without."""
    assert len(FAULTY) >= 20
    assert len(HEALTHY) >= 20
    assert len(KINDS) == 8


def test_the_issue_is_heard_at_the_step_that_finds_it() -> None:
    """The second step's report is unhealthy already."""
    program = FAULTY["softmax before cross_entropy"]
    heard = []
    manager = GradientManager(analyzers=["loss_graph"])
    manager.on_issue(lambda issue, report: heard.append((issue.key, report.step)))
    train(program, 2, manager)
    assert heard == [("ACTIVATED_TWICE:head.0", 2)]


def test_a_muted_type_is_silent() -> None:
    """What is on purpose is said in the settings."""
    program = FAULTY["minus cross_entropy"]
    assert train(program, 2, GradientManager(analyzers=["loss_graph"], mute=["NEGATED_LOSS"])) == []


def test_a_step_without_a_tensor_has_no_report() -> None:
    """A loop that runs backward by itself may give a number, or nothing."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GradientManager(analyzers=["loss_graph"]) as manager:
        for loss in (1.0, 1.0):
            model(torch.ones(1, 4)).sum().backward()
            report = manager.step(model, optimizer, loss, backward=False)
        assert "loss_graph" not in report.analyzers


def test_a_loss_whose_backward_pass_has_run_is_looked_at() -> None:
    """The graph is still there after a backward pass of the user's."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Softmax(dim=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GradientManager(analyzers=["loss_graph"]) as manager:
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randn(3, 4)), torch.tensor([0, 1, 0]))
            loss.backward()  # type: ignore[no-untyped-call]
            manager.step(model, optimizer, loss, backward=False)
        assert [issue.key for issue in manager.diagnose()] == ["ACTIVATED_TWICE:0"]


def test_a_checkpointed_loss_is_computed_as_often_as_without() -> None:
    """No saved tensor is unpacked, which would run the checkpointed part once more."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Softmax(dim=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    calls = []

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return F.cross_entropy(model(x), torch.tensor([0, 1, 2]))

    with GradientManager(analyzers=["loss_graph"]) as manager:
        for _ in range(2):
            optimizer.zero_grad()
            manager.step(model, optimizer, checkpoint(loss_of, torch.randn(3, 4), use_reentrant=False))
        assert [issue.key for issue in manager.diagnose()] == ["ACTIVATED_TWICE:0"]
    assert len(calls) == 4


def test_the_findings_survive_a_checkpoint() -> None:
    """A resumed training knows them before its next look."""
    program = FAULTY["nll of logits"]
    with GradientManager(analyzers=["loss_graph"]) as first:
        model = Network(program.head())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            first.step(model, optimizer, program.loss(model(torch.randn(BATCH, 4)), targets_of(program)))
        state = json.loads(json.dumps(first.state_dict()))
    with GradientManager(analyzers=["loss_graph"]) as second:
        second.attach(model, optimizer)
        second.load_state_dict(state)
        assert [issue.key for issue in second.diagnose()] == ["MISSING_LOG_SOFTMAX:head.0"]


def test_a_weight_with_a_parametrization_is_named_by_its_module() -> None:
    """The graph of a weight-normalised layer has operations of its own."""
    head = nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))
    program = Program("ACTIVATED_TWICE", lambda: nn.Sequential(head, nn.Softmax(dim=1)), F.cross_entropy)
    assert [issue.key for issue in train(program)] == ["ACTIVATED_TWICE:head.0"]
