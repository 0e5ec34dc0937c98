"""The console shows each row and each change of an issue on one line."""

from __future__ import annotations

import io
from typing import Any

import pytest

from gradtrack import GradientManager
from gradtrack.backends.console import ConsoleBackend
from gradtrack.records import Record
from tests.training import batch_loss, optimizer_of, small_model


def printed(*records: Record) -> list[str]:
    """Return the lines that these records make."""
    stream = io.StringIO()
    backend = ConsoleBackend(stream)
    for record in records:
        backend.write([record])
    return stream.getvalue().splitlines()


def row(step: int, *issues: dict[str, Any], **metrics: float) -> Record:
    """Make a record of one step."""
    named = {f"train/grad_{name}": value for name, value in metrics.items()}
    return Record(step=step, time=1.0, metrics=named, issues=issues)


def issue(severity: str = "HIGH", layer: str = "encoder") -> dict[str, Any]:
    """Make an issue as records carry it."""
    text = {"message": "Norm is 12.", "recommendation": "Lower the rate."}
    return {"issue_type": "EXPLODING", "severity": severity, "layer": layer, **text}


def test_row_is_one_readable_line() -> None:
    """Norm before and after, variance, and whether the step was skipped."""
    found = printed(row(100, norm=12.5, norm_clipped=1.0, variance=0.25), row(101, norm=float("nan"), skipped=1.0))
    assert found == ["step 100: gradient norm 12.5 -> 1, variance 0.25", "step 101: gradient norm nan, skipped"]


def test_issue_is_told_when_it_opens_changes_and_closes() -> None:
    """An issue that stays open as it is makes no second line."""
    found = printed(row(1, issue()), row(2, issue()), row(3, issue("CRITICAL")), row(4))
    told = [line.strip() for line in found if line.startswith("  ")]
    assert told == [
        "[HIGH] EXPLODING at encoder: Norm is 12. Lower the rate.",
        "[CRITICAL] EXPLODING at encoder: Norm is 12. Lower the rate.",
        "closed: EXPLODING:encoder",
    ]


def test_what_is_known_later_makes_no_line() -> None:
    """What the optimizer did to a step, told one step later, is no line and closes no issue."""
    manager = GradientManager(
        backends=[{"name": "console", "stream": (stream := io.StringIO())}],
        analyzers=["updates"],
        exploding_threshold=1e-9,
        grad_log_every_n_steps=1,
    )
    model = small_model()
    optimizer = optimizer_of(model)
    for step in range(9):
        optimizer.zero_grad()
        manager.step(model, optimizer, batch_loss(model, step))
        optimizer.step()
    manager.close()
    lines = stream.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines if line.startswith("step")] == [f"step {n}" for n in range(1, 10)]
    assert len(lines) == 10
    assert "EXPLODING" in lines[1]


def test_pairs_have_their_own_issues() -> None:
    """A row of one pair closes no issue of another."""
    other = Record(step=1, time=1.0, metrics={"train/grad_norm/critic": 2.0}, source="critic")
    found = printed(row(1, issue()), other, row(2, issue()))
    assert [line for line in found if "closed" in line] == []
    assert "step 1 critic: gradient norm 2" in found


def test_names_cannot_drive_the_terminal() -> None:
    """Control codes in the name of a layer are not printed."""
    assert "\x1b" not in "".join(printed(row(1, issue(layer="\x1b[31mred"))))


def test_standard_output_is_found_when_it_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a stream the lines go where `sys.stdout` leads at that moment."""
    ConsoleBackend().write([row(1, norm=2.0)])
    assert capsys.readouterr().out == "step 1: gradient norm 2\n"
