"""A training that goes on from a checkpoint is judged like one that never stopped."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typer.testing import CliRunner

from gradtrack import GradientManager, Issue, StepReport, read_run, safe_backward
from gradtrack.cli import app
from gradtrack.pages.html import write_html_report
from gradtrack.pages.run_data import load_run
from tests.pages.pages import Page


class Training:
    """A network whose second layer is dead, under a manager that looks for it."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        dead = nn.Linear(32, 32)
        nn.init.constant_(dead.bias, -50.0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), dead, nn.ReLU(), nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.manager = GradientManager(**{"analyzers": "auto", **settings})
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


def test_resumed_training_is_one_run(tmp_path: Path) -> None:
    """Page, terminal, table and JSON have the steps of both halves, and mark where the second begins."""
    first = Training(run_dir=tmp_path, grad_log_every_n_steps=1, save_gradient_plots=False)
    first.go(30)
    first.manager.close()
    second = Training(run_dir=tmp_path, grad_log_every_n_steps=1, save_gradient_plots=False)
    second.model.load_state_dict(first.model.state_dict())
    second.manager.load_state_dict(pickle.loads(pickle.dumps(first.manager.state_dict())))
    second.go(20)
    second.manager.close()
    run = load_run(tmp_path)
    assert (run.run.run_id, run.state, run.total_steps) == (first.manager.status()["run_id"], "ended", 50)
    tables = read_run(tmp_path)
    assert (tables.steps["step"], tables.resumed) == (list(range(1, 51)), {"": [30]})
    page = Page(write_html_report(run).read_text())
    assert "resumed after step 30" in page.text
    assert all([30, "resumed", 0] in chart["events"] for chart in page.charts)
    assert page.chart("Loss")["lines"][0]["x"] == list(range(1, 51))
    shown = CliRunner().invoke(app, ["show", str(tmp_path)], env={"COLUMNS": "120"}).stdout
    assert "ended, 50 steps" in shown
    assert "resumed after step 30" in shown
    curve, mark = (
        next(line for line in shown.splitlines() if line.startswith(name)) for name in ("variance", "resumed ")
    )
    letters = [at for at, letter in enumerate(curve) if letter in "▁▂▃▄▅▆▇█"]
    assert mark.index("│") == letters[30 * len(letters) // 50]
    told = json.loads(CliRunner().invoke(app, ["show", str(tmp_path), "--json"]).stdout)
    assert (told["run_id"], told["steps"], told["resumed"]) == (run.run.run_id, 50, {"": [30]})


def test_analyzers_look_soon_after_a_resume() -> None:
    """One that looks every thousandth step looks at the first step after a checkpoint, and then as it always does."""
    first = Training(analyzers=["jacobian"])
    first.go(20)
    second = Training(analyzers=["jacobian"])
    second.manager.load_state_dict(first.manager.state_dict())
    looked = {report.step for report in second.go(20) if report.analyzers}
    assert looked == {21, 32}


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
