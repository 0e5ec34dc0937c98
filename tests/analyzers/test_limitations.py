"""An analyzer that was chosen and sees nothing says why: in the log, the report, the journal, `show` and the page."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from gradtrack import Analyzer, GradientManager, Issue, safe_backward
from gradtrack.analyzers.base import Snapshot
from gradtrack.pages.documents import show_document
from gradtrack.pages.html import render
from gradtrack.pages.run_data import load_run
from gradtrack.pages.terminal.overview import show


class Functional(nn.Module):
    """A model that applies functions to its parameters, as functional MAML does; its blocks are never called."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the weights."""
        for weight, bias in zip(*[iter(self.blocks.parameters())] * 2, strict=True):
            x = torch.tanh(nn.functional.linear(x, weight, bias))
        return x


def train(model: nn.Module, analyzers: Any, run_dir: Path, steps: int = 10, *, attached: bool = True) -> list[str]:
    """Train for some steps; return the notes of all reports on analyzers that can do nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GradientManager(analyzers=analyzers, backends=[], run_dir=run_dir, save_gradient_plots=False) as manager:
        if attached:
            manager.attach(model, optimizer)
        for _ in range(steps):
            optimizer.zero_grad()
            safe_backward(model(torch.randn(2, 4)).square().sum(), model, optimizer, manager)
            optimizer.step()
    return [note for report in manager.reports for note in report.notes if "can do nothing" in note]


@pytest.mark.parametrize(
    ("name", "blocks", "because"),
    [
        ("flow", 4, "no module of the model ran"),
        ("gain", 4, "none of the 4 blocks blocks.0 to blocks.3 ran"),
        ("gain", 2, "the model has no chain"),
        ("jacobian", 4, "none of the 4 blocks blocks.0 to blocks.3 ran"),
        ("recurrent", 4, "the step ran no recurrent module"),
        ("transformer", 4, "the forward pass called no attention"),
    ],
)
def test_an_analyzer_that_sees_nothing_says_why(
    name: str, blocks: int, because: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It does so once in the log and in one report, and for everyone who opens the run later."""
    with caplog.at_level(logging.WARNING, "gradtrack"):
        (note,) = train(Functional(blocks), [name], tmp_path)
    assert note.startswith(f"analyzer {name} can do nothing here, because {because}")
    assert [record.getMessage() for record in caplog.records if "can do nothing" in record.getMessage()] == [note]
    run = load_run(tmp_path)
    assert run.caveats == [note]
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(show(run))
    assert f"analyzer {name} can do nothing here" in captured.get()
    assert f"analyzer {name} can do nothing here" in render(run)


class Faulty(Analyzer):
    """An analyzer that fails whenever it is asked for something."""

    looks_every = 1

    def __init__(self, where: str) -> None:
        self.where = where

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise ValueError(f"no\n  good {'x' * 900}")

    def arm(self, model: nn.Module) -> None:
        """Fail before the forward pass."""
        self._fail("arm")

    def inspect(self, snapshot: Snapshot) -> None:
        """Fail at the step."""
        self._fail("inspect")

    def issues(self) -> list[Issue]:
        """Fail after the step."""
        self._fail("issues")
        return []


@pytest.mark.parametrize("where", ["arm", "inspect", "issues"])
def test_an_analyzer_that_is_left_out_is_told(where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In one report, in the log beside one traceback, and for everyone who opens the run later."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GradientManager(
        analyzers=[Faulty(where)], backends=[], run_dir=tmp_path, save_gradient_plots=False
    ) as manager:
        manager.attach(model, optimizer)
        for _ in range(6):
            safe_backward(model(torch.randn(2, 4)).square().sum(), model, optimizer, manager)
            optimizer.step()
    (note,) = [note for report in manager.reports for note in report.notes if "failed" in note]
    assert note.startswith("analyzer faulty failed 3 times and is left out from now on: ValueError: no good x")
    assert len(note) < 600
    told = [record for record in caplog.records if "failed" in record.getMessage()]
    assert [record.exc_info is not None for record in told] == [True, False]
    assert [record.getMessage() for record in told[1:]] == [note]
    run = load_run(tmp_path)
    assert run.caveats == [note]
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(show(run))
    assert "analyzer faulty failed 3 times and is left out" in captured.get()
    assert "analyzer faulty failed 3 times and is left out" in render(run)
    assert json.dumps(show_document(run)).count("analyzer faulty failed 3 times") == 1


@pytest.mark.parametrize("attached", [False, True])
def test_an_analyzer_that_sees_says_nothing(tmp_path: Path, attached: bool) -> None:
    """A model whose modules are called has no such note, also where the first step's ran before the model was known."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    assert train(model, "auto", tmp_path, attached=attached) == []
    assert load_run(tmp_path).caveats == []
