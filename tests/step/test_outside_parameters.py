"""Parameters that an optimizer owns and no module has belong to the pair of the optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrack import GradientManager, StepReport
from tests.training import batch_loss, small_model

ENGINES = ["native", "torch"]


class Training:
    """A model with a temperature and two prompts beside it."""

    def __init__(self, engine: Any = "torch", names: bool = True, **settings: Any) -> None:
        if engine == "native":
            pytest.importorskip("numba")
        self.model = small_model()
        self.temperature = torch.zeros(1, requires_grad=True)
        self.prompts = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 3))]
        name = {"name": "temperature"} if names else {}
        groups: list[dict[str, Any]] = [
            {"params": list(self.model.parameters())},
            {"params": [self.temperature], "lr": 0.5, **name},
            {"params": self.prompts},
        ]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        self.manager = GradientManager(engine=engine, **settings)

    def step(self, factor: float = 1.0) -> StepReport:
        """Make a step."""
        self.optimizer.zero_grad()
        beside: Tensor = self.temperature.exp().sum() * 30 + sum(prompt.square().sum() for prompt in self.prompts)
        return self.manager.step(self.model, self.optimizer, (batch_loss(self.model) + beside) * factor)

    def norm(self) -> float:
        """Return the norm of all gradients, as torch has it."""
        every = [param.grad for group in self.optimizer.param_groups for param in group["params"]]
        return math.sqrt(sum(float(grad.double().square().sum()) for grad in every if grad is not None))


@pytest.mark.parametrize("engine", ENGINES)
def test_they_are_measured_under_the_names_of_their_groups(engine: Any) -> None:
    """The norm is that of everything that the optimizer steps, and a note says so once."""
    training = Training(engine, max_grad_norm=1e9, track_parameters=True)
    first, second = training.step(), training.step()
    assert first.clipping.norm_before == pytest.approx(training.norm(), rel=1e-6)
    assert first.parameters["temperature"].norm == pytest.approx(30.0)
    assert first.groups["temperature"].norm == pytest.approx(30.0)
    assert {"optimizer_group_2.0", "optimizer_group_2.1"} <= set(first.parameters)
    assert first.groups["optimizer_group_2"].element_count == 10
    assert [note for note in first.notes if "in no module" in note] == [
        "3 parameter(s) of the optimizer are in no module of Sequential: they are measured, clipped and protected "
        "with it, as temperature, optimizer_group_2."
    ]
    assert second.notes == []


@pytest.mark.parametrize("engine", ENGINES)
def test_they_are_clipped_with_the_model(engine: Any) -> None:
    """All gradients are scaled by one factor, to the limit together."""
    training = Training(engine, max_grad_norm=0.5)
    training.step()
    assert training.norm() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_that_is_not_finite_does_not_move_them(engine: Any) -> None:
    """Neither where the infinity is theirs, nor where it is the model's."""
    training = Training(engine)
    training.step()
    training.optimizer.step()
    before = [param.detach().clone() for param in (training.temperature, *training.prompts)]
    report = training.step(math.inf)
    training.optimizer.step()
    assert report.skipped
    assert all(map(torch.equal, before, (training.temperature, *training.prompts)))


def test_a_group_that_is_added_later_is_measured() -> None:
    """From the next step on."""
    training = Training(max_grad_norm=1e9)
    training.step()
    late = nn.Parameter(torch.ones(2))
    training.optimizer.add_param_group({"params": [late], "name": "late"})
    late.grad = torch.ones(2)
    training.optimizer.zero_grad(set_to_none=False)
    torch.autograd.backward(batch_loss(training.model) + late.sum())
    report = training.manager.step(training.model, training.optimizer, None, backward=False)
    assert report.groups["late"].norm == pytest.approx(math.sqrt(2))


def test_what_another_pair_has_in_its_model_is_left_to_it() -> None:
    """One optimizer over two models, each of which is a pair: every gradient is measured once."""
    first, second = small_model(0), small_model(1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    manager = GradientManager(max_grad_norm=1e9)
    manager.attach(first, optimizer, name="first")
    manager.attach(second, optimizer, name="second")
    reports = []
    for model in (first, second):
        torch.autograd.backward(batch_loss(model))
        reports.append(manager.step(model, optimizer, None, backward=False))
    for model, report in zip((first, second), reports, strict=True):
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert report.clipping.norm_before == pytest.approx(float(torch.cat([grad.flatten() for grad in grads]).norm()))
        assert not any("optimizer_group" in name for name in report.groups)


def test_analyzers_look_at_the_model_alone() -> None:
    """None of them fails over names that no module has."""
    training = Training(analyzers="auto")
    for _ in range(12):
        report = training.step()
        training.optimizer.step()
    assert set(training.manager.status()) == {"run_id", "run_dir", "closed", "steps", "journal", "backends", "alerts"}
    assert not any("failed" in note for note in report.notes)
    assert training.manager.diagnose() == training.manager.diagnose()


def test_the_state_of_the_fast_path_covers_them() -> None:
    """Fast steps clip them as others do."""
    fast, close = (Training("native", max_grad_norm=0.5) for _ in range(2))
    for _ in range(80):
        norms = []
        for training, check in ((fast, 1), (close, 2)):
            training.manager.config.check_frequency = check
            training.optimizer.param_groups[0]["lr"] = training.optimizer.param_groups[1]["lr"] = 1e-5
            training.step()
            norms.append(training.norm())
            training.optimizer.step()
        assert norms[0] == norms[1]
