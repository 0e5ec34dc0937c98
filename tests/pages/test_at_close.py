"""The pictures that a manager leaves when it closes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from gradtrack import GradientManager
from gradtrack.pages import at_close, pictures

NAMES = {"training_curves.png", "gradient_statistics.png", "gradient_stats.png", "gradient_flow.png"}


def train(**settings: object) -> None:
    """Take one step and close."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GradientManager({"max_grad_norm": 1.0, **settings}) as manager:
        manager.step(model, optimizer, model(torch.ones(1, 2)).sum())


def test_pictures_are_written_into_a_named_directory(tmp_path: Path) -> None:
    """A run whose directory was named ends with its pictures there."""
    train(run_dir=tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == NAMES


def test_pictures_can_be_switched_off(tmp_path: Path) -> None:
    """`save_gradient_plots=False` leaves no picture."""
    train(run_dir=tmp_path, save_gradient_plots=False)
    assert not list(tmp_path.glob("*.png"))


def test_runs_without_a_directory_leave_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a named directory nothing is written."""
    monkeypatch.chdir(tmp_path)
    train()
    assert not list(tmp_path.iterdir())


def test_a_picture_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A picture that cannot be drawn is logged, and the others are drawn."""

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(pictures, "draw_training_curves", fail)
    with caplog.at_level(logging.WARNING, logger="gradtrack"):
        train(run_dir=tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == NAMES - {"training_curves.png"}
    assert "training_curves.png could not be written" in caplog.text


def test_the_report_is_written_when_it_is_asked_for(tmp_path: Path) -> None:
    """`save_html_report=True` leaves the page of the run, which has ended."""
    train(run_dir=tmp_path / "without")
    assert not (tmp_path / "without" / "report.html").exists()
    train(run_dir=tmp_path / "with", save_html_report=True, grad_log_every_n_steps=1)
    assert "1 recorded" in (tmp_path / "with" / "report.html").read_text(encoding="utf-8")


def test_a_short_run_has_a_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A training of one step has a page, and says nothing."""
    train(run_dir=tmp_path, save_html_report=True)
    assert (tmp_path / "report.html").exists()
    assert not caplog.records


def test_a_report_that_fails_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A page that cannot be written is logged, and the run closes all the same."""
    (tmp_path / "report.html").mkdir()
    train(run_dir=tmp_path, save_html_report=True, grad_log_every_n_steps=1)
    assert "the report could not be written" in caplog.text


def test_without_matplotlib_there_are_no_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without matplotlib closes in silence."""
    monkeypatch.setattr(at_close, "find_spec", lambda _: None)
    train(run_dir=tmp_path)
    assert not list(tmp_path.glob("*.png"))
