"""A verdict is heard when its analyzer reaches it, and at the end: in reports, callbacks, rows, files and `show`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from gradtrack import Analyzer, GradientManager, Issue, IssueSeverity, IssueType, StepReport, cli
from gradtrack.analyzers.base import Snapshot
from gradtrack.delivery.run_files import RUN_END, RunEnd
from gradtrack.pages.run_data import load_run
from gradtrack.reports import Report


class Verdict(Analyzer):
    """An analyzer that looks at every n-th step, and finds a fault between two steps."""

    def __init__(self, every: int = 1, first: int = 1, last: int = 1000) -> None:
        self.looks_every, self._first, self._last = every, first, last
        self.step = 0

    def inspect(self, snapshot: Snapshot) -> Report | None:
        """Look at a step."""
        self.step = snapshot.step
        return None

    def issues(self) -> list[Issue]:
        """Return the fault while it lasts."""
        return [issue_of(IssueType.DEAD, "0")] if self._first <= self.step <= self._last else []


class AtTheEnd(Verdict):
    """An analyzer that finds its fault only after its last look."""

    over = False

    def issues(self) -> list[Issue]:
        """Return the fault once the training is over."""
        return [issue_of(IssueType.DEAD, "0")] if self.over else []


def issue_of(kind: IssueType, layer: str) -> Issue:
    """Return an issue that hurts the training."""
    return Issue(issue_type=kind, severity=IssueSeverity.HIGH, layer=layer, message="It.", recommendation="Mend it.")


def train(manager: GradientManager, steps: int) -> list[StepReport]:
    """Train a small model and return the reports."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    reports = []
    for _ in range(steps):
        optimizer.zero_grad()
        reports.append(manager.step(model, optimizer, model(torch.randn(8, 4)).square().mean()))
        optimizer.step()
    return reports


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 30), st.integers(0, 20), st.integers(1, 30))
def test_a_verdict_is_heard_at_the_look_at_which_it_is_reached(every: int, first: int, length: int, steps: int) -> None:
    """From that step on, and no longer than to the first look without it, reports and diagnosis agree."""
    opened: list[int] = []
    with GradientManager(analyzers=[Verdict(every, first, first + length)]) as manager:
        manager.on_issue(lambda issue, report: opened.append(report.step))
        reports = train(manager, steps)
        last = manager.diagnose()
    looks = [step for step in range(every, steps + 1, every) if first <= step <= first + length]
    assert opened == looks[:1]
    unhealthy = [report.step for report in reports if not report.health.healthy]
    assert unhealthy == [step for step in range(1, steps + 1) if step // every * every in looks]
    assert [issue.key for issue in last] == [issue.key for issue in reports[-1].health.issues]


def test_what_is_found_at_the_end_is_told_everywhere(tmp_path: Path) -> None:
    """The last report, callbacks, the rows, the summary, the end of the run and `show --check` say the same."""
    analyzer, heard = AtTheEnd(every=4), list[tuple[str, int]]()
    manager = GradientManager(
        analyzers=[analyzer], backends=["memory"], run_dir=tmp_path / "run", save_gradient_plots=False
    )
    manager.on_issue(lambda issue, report: heard.append((issue.key, report.step)))
    train(manager, 30)
    analyzer.over = True
    expected = [issue.key for issue in manager.diagnose()]
    manager.close()
    assert expected == ["DEAD:0"]
    assert heard == [("DEAD:0", 30)]
    assert [issue.key for issue in manager.reports[-1].health.issues] == expected
    assert manager.get_training_summary().health_issues.unhealthy_steps == 1
    memory: Any = manager.backend("memory")
    last = memory.records[-1]
    assert (last.step, last.metrics["train/grad_healthy"]) == (30, 0.0)
    assert [issue["issue_type"] for issue in last.issues] == ["DEAD"]
    end = RunEnd.load(tmp_path / "run" / RUN_END)
    assert end is not None
    assert not end.last[-1].health.healthy
    assert [issue.key for issue in load_run(tmp_path / "run").open_issues] == expected
    shown = CliRunner().invoke(cli.app, ["show", str(tmp_path / "run"), "--check"])
    assert shown.exit_code == 1
    assert "DEAD" in shown.output


def test_what_is_over_at_the_end_is_closed_there(tmp_path: Path) -> None:
    """An issue that was open at the last look and is not there any more is closed on the last step."""
    analyzer = AtTheEnd(every=4)
    analyzer.over = True
    with GradientManager(analyzers=[analyzer], run_dir=tmp_path / "run", save_gradient_plots=False) as manager:
        train(manager, 30)
        analyzer.over = False
    (issue,) = load_run(tmp_path / "run").issues
    assert issue.spans == [(4, 30)]
    assert manager.reports[-1].health.healthy


@pytest.mark.parametrize(("steps", "rows"), [(30, [1, 2, 4, 8, 16, 30]), (16, [1, 2, 4, 8, 16])])
def test_an_end_without_news_makes_one_row_of_the_last_step(steps: int, rows: list[int], tmp_path: Path) -> None:
    """What was told at the last look is not told again, and a last step that has its row gets no second one."""
    with GradientManager(
        analyzers=[Verdict(every=4)], backends=["memory"], run_dir=tmp_path / "run", save_gradient_plots=False
    ) as manager:
        train(manager, steps)
        memory: Any = manager.backend("memory")
    assert [record.step for record in memory.records] == rows


def test_a_callback_that_fails_at_the_end_is_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """No training is left that it could stop, so the run ends as it should."""

    def stop(issue: Issue, report: StepReport) -> None:
        raise RuntimeError(f"stop at {report.step}")

    analyzer = AtTheEnd(every=4)
    with GradientManager(analyzers=[analyzer], run_dir=tmp_path / "run", save_gradient_plots=False) as manager:
        manager.on_issue(stop)
        train(manager, 10)
        analyzer.over = True
    assert "found at the end" in caplog.text
    assert (tmp_path / "run" / RUN_END).exists()


@pytest.mark.parametrize("saved_at", [7, 8])
def test_verdicts_go_on_after_a_checkpoint(saved_at: int) -> None:
    """An issue that was open when the state was saved does not open again, and closes when it is over."""
    with GradientManager(analyzers=[Verdict(4, 4, 11)]) as manager:
        train(manager, saved_at)
        state = manager.state_dict()
    opened: list[int] = []
    analyzer = Verdict(4, 4, 11)
    analyzer.step = saved_at
    with GradientManager(analyzers=[analyzer]) as manager:
        manager.on_issue(lambda issue, report: opened.append(report.step))
        manager.load_state_dict(state)
        reports = train(manager, 8)
    assert opened == []
    assert [report.step for report in reports if not report.health.healthy] == list(range(saved_at + 1, 12))


def test_the_collapse_of_a_policy_is_heard_when_its_risk_is_high() -> None:
    """The issue opens on the step whose report first has the risk HIGH."""
    manager = GradientManager(analyzers=["rl_policy"])
    policy: Any = manager.analyzer("rl_policy")
    opened: list[int] = []
    manager.on_issue(
        lambda issue, report: opened.append(report.step) if issue.issue_type.value == "ENTROPY_COLLAPSE" else None
    )
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    risks = {}
    for step in range(1, 61):
        logits = torch.randn(32, 4).softmax(-1).log() * max(1.0, step - 20)
        policy.observe(logits.log_softmax(-1), episode_return=0.0)
        optimizer.zero_grad()
        report = manager.step(model, optimizer, model(torch.randn(8, 4)).square().mean())
        optimizer.step()
        found: Any = report.analyzers["rl_policy"]
        risks[step] = found.entropy_collapse_risk
    manager.close()
    assert opened[0] == next(step for step, risk in risks.items() if risk == "HIGH")
