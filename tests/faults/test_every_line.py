"""An exception at any line of a step, as the handler of a signal raises it, harms neither training nor record."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrack import GradientManager, StepReport
from gradtrack.delivery.journal.reading import find_journals
from tests.faults.every_line import (
    NUMBERS_OF_POINTS,
    GuardedMemory,
    Point,
    Strike,
    Struck,
    ends_of,
    spread,
    watching_lines,
)
from tests.training import small_model

QUIET, AFTER = 44, 40


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of stepping: its settings, how many steps are watched, and what spoils the gradients of some."""

    settings: dict[str, Any]
    before: int = QUIET
    """After how many quiet steps an exception strikes."""
    watched: int = 2
    lr: float = 1e-4
    spoil: Callable[[nn.Module, int], object] = lambda model, step: None
    stride: int = 6
    """How many lines the slow test goes from one strike to the next; the short one goes further."""


def _make_nan(model: nn.Module, step: int) -> None:
    if step == QUIET + 1:
        param = next(model.parameters())
        assert param.grad is not None
        param.grad[0] = math.nan


def _grow(model: nn.Module, step: int) -> None:
    if step >= QUIET + 1:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(500.0)


def _spike(model: nn.Module, step: int) -> None:
    if step == QUIET + 1:
        _grow(model, step)


SPIKES: dict[str, Any] = {"engine": "native", "grad_log_every_n_steps": 40, "spike_window": 32}

WAYS = {
    "first steps": Way(settings={"engine": "native", "grad_log_every_n_steps": 2}, before=0, watched=3),
    "first steps with analyzers": Way(
        settings={"engine": "native", "analyzers": "auto", "grad_log_every_n_steps": 2}, before=0, watched=2, stride=24
    ),
    "fast path": Way(settings={"engine": "native", "grad_log_every_n_steps": 20}, watched=18, stride=1),
    "row": Way(settings={"engine": "native", "grad_log_every_n_steps": 1}, stride=1),
    "row of torch": Way(settings={"engine": "torch", "grad_log_every_n_steps": 1}),
    "statistics of parameters": Way(settings={"track_parameters": True, "grad_log_every_n_steps": 2}, watched=4),
    "adaptive": Way(settings={"clip_type": "adaptive", "engine": "native", "grad_log_every_n_steps": 5}, watched=6),
    "agc": Way(settings={"clip_type": "agc", "grad_log_every_n_steps": 3}, watched=3),
    "groups": Way(settings={"max_grad_norm": {"0": 0.05, ".*": 0.3}, "grad_log_every_n_steps": 3}, watched=3),
    "another norm": Way(settings={"max_grad_norm": 0.5, "norm_type": 1, "grad_log_every_n_steps": 3}, watched=3),
    "spike left out": Way(settings={**SPIKES, "spike_action": "skip"}, watched=4, spoil=_spike),
    "spike clipped": Way(settings={**SPIKES, "spike_action": "clip"}, watched=4, spoil=_spike),
    "rollback": Way(settings={**SPIKES, "spike_action": "rollback", "spike_lr_factor": 0.5}, watched=4, spoil=_spike),
    "listed": Way(settings={"engine": "native", "skip_steps": [[QUIET + 2, QUIET + 3]]}, watched=6, stride=3),
    "not finite": Way(settings={"engine": "native", "grad_log_every_n_steps": 40}, watched=4, spoil=_make_nan),
    "issue": Way(settings={"engine": "native", "grad_log_every_n_steps": 40}, watched=4, spoil=_grow),
    "analyzers": Way(
        settings={"analyzers": ["flow", "updates", "gain"], "grad_log_every_n_steps": 5}, watched=5, stride=24
    ),
}


class Training:
    """A quiet training."""

    def __init__(self, way: Way, directory: Path | None = None) -> None:
        self.way, self.reports = way, list[StepReport]()
        self.model = small_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=way.lr)
        settings = {**way.settings, "save_gradient_plots": False}
        if directory is not None:
            settings["run_dir"] = directory
        self.manager = GradientManager(**settings)
        self.manager.attach(self.model, self.optimizer)
        self.manager.on_rollback(lambda step, report: None)

    def loss(self, step: int) -> Tensor:
        """Return the loss of a batch, which differs little from the last one."""
        inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(step % 8))
        loss: Tensor = (self.model(inputs) - 1.0).square().mean()
        return loss

    def step(self, step: int, *, look: bool = True, update: bool = True) -> None:
        """Make a step of a loop."""
        self.optimizer.zero_grad()
        loss = self.loss(step)
        torch.autograd.backward(loss)
        self.way.spoil(self.model, step)
        if look:
            self.reports.append(self.manager.step(self.model, self.optimizer, loss, backward=False))
        if update:
            self.optimizer.step()


def weights(training: Training) -> list[Tensor]:
    """Return copies of the weights."""
    return [param.detach().clone() for param in training.model.parameters()]


@cache
def reference(name: str, struck_at: int, num_steps: int, look: bool, update: bool) -> list[Tensor]:
    """Return the weights of a training which looks at one step or not, and makes its update or not."""
    training = Training(WAYS[name])
    for step in range(num_steps):
        training.step(step, look=look or step != struck_at, update=update or step != struck_at)
    training.manager.close()
    return weights(training)


def quiet(way: Way, directory: Path | None = None) -> Training:
    """Return a training which nothing has happened to yet."""
    training = Training(way, directory)
    for step in range(way.before):
        training.step(step)
    return training


def points_of(name: str, directory: Path) -> list[Point]:
    """Return where an exception can strike."""
    points: list[Point] = []
    way = WAYS[name]
    for run in ("imports", "points"):  # what the first steps of a process import is there at the second ones
        training = quiet(way, directory / run)
        points.clear()
        with watching_lines(points.append):
            for step in range(way.before, way.before + way.watched):
                training.step(step)
        training.manager.close()
    return ends_of(points)


def strike(name: str, point: Point, directory: Path) -> None:
    """Let an exception strike once, train on, and hold what is left to the law."""
    way = WAYS[name]
    training, raiser, step, struck_at = quiet(way, directory), Strike(point), way.before, -1
    with watching_lines(raiser):
        while not raiser.struck and step < way.before + way.watched:
            try:
                training.step(step)
            except Struck:
                struck_at = step
            step += 1
    for later in range(step, step + AFTER):
        training.step(later)
    training.manager.close()
    found, num_steps = weights(training), step + AFTER
    ways = (True, False), (False, False), (True, True)  # the last where it struck a hook after the update
    either = [reference(name, struck_at, num_steps, look, update) for look, update in ways]
    assert any(all(map(torch.equal, found, wanted)) for wanted in either), f"{point}: other weights"
    every = training.manager.config.grad_log_every_n_steps
    (journal,) = find_journals(directory)
    rows = [(number, record.step) for number, record in journal.rows()]
    assert journal.damaged == [], point
    assert len({number for number, _ in rows}) == len(rows), point
    due = [report.step for report in training.reports if not report.step % every]
    assert set(due) <= {step for _, step in rows}, f"{point}: rows are missing"
    steps = [report.step for report in training.reports]
    assert sorted(set(steps)) == steps, f"{point}: steps are numbered twice"
    modules = list(training.model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules), f"{point}: hooks stay"


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("num_points", NUMBERS_OF_POINTS)
def test_exception_at_any_line_of_a_step_harms_nothing(
    tmp_path: Path, name: str, num_points: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only that exception comes out, the training goes on as without it with all analyzers, and every row is kept."""
    native = pytest.importorskip("gradtrack.gradients.native.engine", reason="numba is not installed")
    memory = GuardedMemory()
    monkeypatch.setattr(native, "np", memory)
    points = points_of(name, tmp_path / "points")
    assert len(points) > 50
    for index, point in enumerate(spread(points[:: WAYS[name].stride], num_points)):
        strike(name, point, tmp_path / str(index))
        assert "failed" not in caplog.text, f"{point}: {caplog.text}"
    assert WAYS[name].settings.get("engine") != "native" or memory.is_whole()
