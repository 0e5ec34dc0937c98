"""A look on an accelerator: how often the processor waits for it, and that it finds what it finds on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import looks
from benchmarks.analyzers import gpt, lstm
from gradtrack import registry
from gradtrack.analyzers.tools import samples

WAITS = {
    "flow": {"GPT": 2, "LSTM": 2},
    "gain": {"GPT": 1},
    "jacobian": {"GPT": 1},
    "loss_graph": {"GPT": 1, "LSTM": 1},
    "precision": {"GPT": 2, "LSTM": 2},
    "recurrent": {"LSTM": 1},
    "transformer": {"GPT": 1},
    "updates": {"GPT": 1, "LSTM": 1},
    "vector": {"GPT": 1, "LSTM": 1},
}
OTHERS = {"rl_policy"}
"""Analyzers of other models."""

CASES = [(name, case) for name, cases in WAITS.items() for case in cases]
Build = Callable[[], tuple[nn.Module, Callable[[], Tensor]]]


def test_every_analyzer_is_counted() -> None:
    """A new analyzer has its place in the table."""
    assert WAITS.keys() | OTHERS == set(registry.analyzers.builtin())


@pytest.mark.parametrize(("analyzer", "case"), CASES)
def test_a_look_waits_for_the_device_so_often(analyzer: str, case: str) -> None:
    """Each read is counted, and so are copies that the device waits for: one more is too many."""
    found = looks.look(analyzer, looks.CASES[case])
    assert found is not None
    assert found.waits == WAITS[analyzer][case] <= looks.MOST_WAITS, found.places


def numbers(analyzer: str, build: Build, accelerator: looks.Accelerator | None) -> dict[str, float]:
    """Return what an analyzer reports of a training, by step and name."""
    reports = enumerate(looks.train(analyzer, build, 2 * looks.EVERY + 1, accelerator))
    known = {step: report.metrics() for step, report in reports if report is not None}
    return {f"{step} {name}": value for step, found in known.items() for name, value in found.items()}


@pytest.mark.parametrize(("analyzer", "case"), [one for one in CASES if one[0] != "loss_graph"])
def test_a_look_finds_the_same_there(analyzer: str, case: str) -> None:
    """What is reduced on the device and read together are the numbers that the CPU finds."""
    expected = numbers(analyzer, looks.CASES[case], None)
    assert expected
    assert numbers(analyzer, looks.CASES[case], looks.Accelerator()) == pytest.approx(expected, rel=2e-4, nan_ok=True)


def large_lstm() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return an LSTM whose states are too large for the CPU."""
    return lstm(inputs=8, hidden=300, layers=1, batch=4, length=8)


def words() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a GPT of whose embedding few rows have a gradient."""
    return gpt(batch=2, vocabulary=8000, width=16, depth=3, length=8)


def normalised() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return blocks with buffers, some of them in evaluation mode."""
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(4)]
    model, x = nn.Sequential(*blocks), torch.randn(32, 16)
    blocks[0][1].eval()
    return model, lambda: model(x).square().mean()


class Unrolled(nn.Module):
    """A cell in a loop of one's own, with attention over its states."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Run all steps, and attend to them by hand."""
        states = [torch.zeros_like(x[0, :, :1]).expand(-1, 16)]
        for part in x:
            states.append(self.cell(part, states[-1]))
        found = torch.stack(states[1:], dim=1)
        scores = found @ found.transpose(1, 2) / 4
        return self.head(F.softmax(scores.unsqueeze(1), dim=-1).squeeze(1) @ found)  # type: ignore[no-any-return]


def unrolled() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a cell in a loop."""
    model, x = Unrolled(), torch.randn(12, 4, 8)
    return model, lambda: model(x).square().mean()


def accumulated() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a model whose gradients are there before the step."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(32, 8)

    def loss() -> Tensor:
        for part in torch.split(x, 8):
            torch.autograd.backward(model(part).square().mean())
        return model(x).square().mean()  # type: ignore[no-any-return]

    return model, loss


ODD: list[tuple[str, Build, int]] = [
    ("recurrent", large_lstm, 1),
    ("flow", words, 3),  # where gradients are sparse is known once they are read
    ("updates", words, 1),
    ("flow", normalised, 2),
    ("jacobian", normalised, 2),
    ("recurrent", unrolled, 1),
    ("transformer", unrolled, 1),
    ("flow", unrolled, 2),
    ("flow", accumulated, 2),
    ("vector", accumulated, 2),
]


@pytest.mark.parametrize(("analyzer", "build", "waits"), ODD)
def test_other_models_wait_no_more(analyzer: str, build: Build, waits: int) -> None:
    """Large states, sparse gradients, buffers, loops and accumulation keep to the bound, and to the CPU's numbers."""
    found = looks.look(analyzer, build)
    assert found is not None
    assert found.waits == waits <= looks.MOST_WAITS, found.places
    expected = numbers(analyzer, build, None)
    assert numbers(analyzer, build, looks.Accelerator()) == pytest.approx(expected, rel=2e-3, abs=1e-6, nan_ok=True)


def test_tensors_of_every_type_are_read_together() -> None:
    """Whatever their type and shape, they come with one copy and as they were."""
    given: list[Any] = [
        torch.tensor(3.5, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.randn(4, 6, dtype=torch.float32)[:, ::2].T,
        torch.empty(0, 3, dtype=torch.float16),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.arange(7),
        torch.tensor([1, 2], dtype=torch.uint8),
        torch.tensor(math.nan),
    ]
    accelerator = looks.Accelerator()
    with accelerator.running():
        read = samples.read_together(given)
    assert accelerator.places.total() == 1
    for one, other in zip(read, given, strict=True):
        assert accelerator.is_on_host(one)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
