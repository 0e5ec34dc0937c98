"""An exception at any line of an analyzer, as the handler of a signal raises it, leaves nothing changed behind."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradtrack import GradientManager, registry
from gradtrack.analyzers.tools.hooks import is_unheard
from tests.faults.every_line import NUMBERS_OF_POINTS, Point, Strike, Struck, ends_of, spread, watching_lines

WATCHED, AFTER = 4, 4


class Network(nn.Module):
    """A network in which every analyzer finds something: attention, an LSTM and a chain of blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.rnn = nn.LSTM(6, 6, batch_first=True)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.1)) for _ in range(3))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return three logits."""
        found: Tensor = self.blocks(self.rnn(self.attention(x, x, x, need_weights=False)[0])[0][:, -1])[:, :3]
        return found


class Training:
    """A training that goes back to before a step that was struck, and makes it again."""

    def __init__(self, name: str | None) -> None:
        torch.manual_seed(0)
        self.name, self.model = name, Network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.manager = GradientManager(
            analyzers=[{"name": name, "every": 2}] if name else [], engine="torch", save_gradient_plots=False
        )
        self.looks, self.closed = list[int](), False

    def run(self, steps: range) -> None:
        """Attach, and make some steps; each again where it is struck."""
        self._again(lambda: self.manager.attach(self.model, self.optimizer))
        for step in steps:
            self._again(lambda step=step: self._step(step))

    def close(self) -> None:
        """Close, and again if that is struck."""
        self._again(self.manager.close)
        self.closed = True

    def _again(self, call: Any) -> None:
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        try:
            call()
        except Struck:
            self.model.load_state_dict(before)
            call()

    def _step(self, step: int) -> None:
        torch.manual_seed(step)
        self.optimizer.zero_grad()
        for _ in range(2):
            logits = self.model(torch.randn(4, 5, 6))
            loss = nn.functional.cross_entropy(logits, torch.randint(3, (4,)))
            torch.autograd.backward(loss)
        if self.name == "rl_policy":
            policy: Any = self.manager.analyzer("rl_policy")
            policy.observe(logits.detach())
        report = self.manager.step(self.model, self.optimizer, loss, backward=False)
        self.looks += [step] if self.name in report.analyzers else []
        self.optimizer.step()


def left_behind(training: Training) -> Iterator[str]:
    """Name every hook on what is the user's, and every module in another mode."""
    owners = [sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]]
    for owner in [*owners, training.optimizer, *training.model.modules(), *training.model.parameters()]:
        for name in dir(owner):
            if "_hooks" in name and isinstance(getattr(owner, name), dict) and getattr(owner, name):
                yield f"{name} of {type(owner).__name__}"
    yield from (f"the mode of {name}" for name, module in training.model.named_modules() if not module.training)


def surroundings() -> list[Any]:
    """Return what belongs to the process and to this thread."""
    functions = nn.functional
    return [
        *(functions.scaled_dot_product_attention, functions.multi_head_attention_forward, functions.softmax),
        torch.overrides._get_current_function_mode_stack(),  # type: ignore[no-untyped-call]
        *(list(warnings.filters), torch.backends.mkldnn.enabled, torch.get_num_threads(), is_unheard()),
        *(random.getstate(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
    ]


def weights(training: Training) -> list[Tensor]:
    """Return weights and buffers."""
    return list(training.model.state_dict().values())


@cache
def reference(name: str | None) -> Training:
    """Return a training that nothing strikes."""
    training = Training(name)
    training.run(range(1, WATCHED + AFTER + 1))
    training.close()
    return training


def points_of(name: str) -> list[Point]:
    """Return where an exception can strike in what an analyzer is, and in what runs it."""
    points: list[Point] = []
    training = Training(name)
    with watching_lines(points.append):
        training.run(range(1, WATCHED + 1))
        training.close()
    return ends_of([point for point in points if "/analyzers" in point.file or "optimizer" in point.file])


def strike(name: str, point: Point) -> None:
    """Let an exception strike once, train on, and look for what it has left behind."""
    reference(None)
    before, training, raiser = surroundings(), Training(name), Strike(point)
    with watching_lines(raiser):
        training.run(range(1, WATCHED + 1))
        if not raiser.struck:
            training.close()
    if not training.closed:
        training.run(range(WATCHED + 1, WATCHED + AFTER + 1))
        training.close()
        assert all(map(torch.equal, weights(training), weights(reference(None)))), f"{point}: other weights"
        assert training.looks[-1] > WATCHED + 1, f"{point}: the analyzer looks no more"
    assert raiser.struck, f"{point}: was not reached"
    left = list(left_behind(training))
    assert not left, f"{point}: {left}"
    assert surroundings() == before, point


@pytest.mark.parametrize("name", sorted(registry.analyzers.builtin()))
@pytest.mark.parametrize("num_points", NUMBERS_OF_POINTS)
def test_exception_at_any_line_of_a_look_leaves_nothing(
    name: str, num_points: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No hook, no mode and no name of torch stays changed; the training and the analyzer go on as without it."""
    points = points_of(name)
    assert len(points) > 50
    for point in spread(points, num_points):
        strike(name, point)
        assert "failed" not in caplog.text, f"{point}: {caplog.text}"
