"""The history of a training: its summary, its log, and files that are written atomically."""

import gc
import json
import math
import os
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from gradtrack import GradientManager, StepReport, safe_backward
from gradtrack.delivery.run_files import new_run_id, write_atomically
from gradtrack.step.data import kept_batch
from gradtrack.step.history import History
from tests.training import small_model, train


def test_summary_agrees_with_the_reports() -> None:
    """The running sums are those of the reports, non-finite norms left out."""
    manager = GradientManager(max_grad_norm=0.3)
    reports = train(manager, 30, change=lambda step, loss: loss * (math.nan if step == 9 else 1.0))
    norms = np.array([report.clipping.norm_before for report in reports if report.step != 9], dtype=float)
    summary = manager.get_training_summary()
    found = summary["gradient_statistics"]["gradient_norms"]
    assert found["mean"] == pytest.approx(norms.mean())
    assert found["std"] == pytest.approx(norms.std(ddof=1))
    assert (found["min"], found["max"], found["count"]) == (norms.min(), norms.max(), 29)
    assert summary["total_steps"] == 30
    assert summary["health_issues"]["unhealthy_steps"] == 1
    assert summary.health_issues.issues == {"NUMERICAL": 1}
    assert summary.nan_inf_summary.skipped_steps == summary.nan_inf_summary.nonfinite_steps == 1
    clipped = sum(report.clipping.clipped for report in reports)
    assert clipped > 0
    assert summary.clipping_summary.clipped_steps == clipped


def test_steps_that_wait_are_gone_with_a_state_that_is_loaded() -> None:
    """A summary that is continued is that of the run that was saved."""
    saved, manager = GradientManager(), GradientManager()
    train(saved, 40)
    train(manager, 45)
    manager.load_state_dict(saved.state_dict())
    assert manager.get_training_summary() == saved.get_training_summary()


def test_a_summary_may_be_asked_for_in_other_threads() -> None:
    """Every step is in the sums once, however often they are asked for while it comes."""
    history, training = History(5), threading.Event()
    before = sys.getswitchinterval()
    readers = [threading.Thread(target=lambda: [history.summary() for _ in iter(training.is_set, True)]) for _ in "ab"]
    sys.setswitchinterval(1e-6)
    try:
        for reader in readers:
            reader.start()
        for step in range(5_000):
            history.extend([StepReport(step=step)], [1.0], size=5, clipped=1)
    finally:
        training.set()
        for reader in readers:
            reader.join()
        sys.setswitchinterval(before)
    found = history.summary()
    assert found.total_steps == found.clipping_summary.clipped_steps == 5_000
    assert found.gradient_statistics.gradient_norms.count == 5_000


def test_replacements_are_counted_by_element() -> None:
    """The total of replacements is that of elements."""
    manager = GradientManager(nonfinite_action="replace")
    train(manager, 2, change=lambda step, loss: loss * (math.nan if step == 2 else 1.0))
    assert manager.get_training_summary()["nan_inf_summary"]["total_replacements"] == 53


def test_training_log(tmp_path: Path) -> None:
    """The log holds configuration, summary and steps, NaN as Python's json reads it."""
    manager = GradientManager(max_grad_norm=0.3)
    train(manager, 5, change=lambda step, loss: loss * (math.nan if step == 3 else 1.0))
    values = json.loads(manager.save_training_log(tmp_path / "deep" / "log.json").read_text())
    assert values["config"]["max_grad_norm"] == 0.3
    assert values["summary"]["total_steps"] == 5
    assert [step["step"] for step in values["steps"]] == [1, 2, 3, 4, 5]
    assert math.isnan(values["steps"][2]["clipping"]["norm_before"])
    assert values["steps"][2]["health"]["issues"][0]["severity"] == "CRITICAL"


class TestAtomicFiles:
    """Files that are whole or not there."""

    def test_replaces(self, tmp_path: Path) -> None:
        """The new text is there and nothing else is left behind."""
        for text in ("one", "two"):
            write_atomically(tmp_path / "file", text)
        assert (tmp_path / "file").read_text() == "two"
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_failure_keeps_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A write that fails leaves the old file unchanged."""
        write_atomically(tmp_path / "file", "old")

        def fail(*_: object) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space left"):
            write_atomically(tmp_path / "file", "new")
        assert (tmp_path / "file").read_text() == "old"
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_run_ids_differ() -> None:
    """Two runs of one process in one second have different names."""
    assert new_run_id() != new_run_id()


def test_reports_keep_no_batch_alive() -> None:
    """A thousand reports are kept: of a tensor its type and shape in words, and plain data as it is."""
    model, kept = small_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GradientManager(engine="native", backends=[]) as manager:
        for step in range(60):
            x = torch.randn(8, 6)
            kept.append(weakref.ref(x))
            names = {"x": x, "ids": [step, step + 1], "of": ("a", None)}
            optimizer.zero_grad()
            report = safe_backward(model(x).square().mean(), model, optimizer, manager, batch=names)
            optimizer.step()
            assert report.batch == {"x": "float32[8, 6]", "ids": [step, step + 1], "of": ("a", None)}
        del x, names
        gc.collect()
        assert not any(one() is not None for one in kept)
        assert len(manager.reports) == 60


@pytest.mark.parametrize("batch", [None, 7, "a", [1, 2], ("a", None), {"a": {"b": [1.5]}}, list(range(1000))])
def test_a_batch_of_plain_data_is_kept_as_it_is(batch: object) -> None:
    """The same object, so that nothing is copied."""
    assert kept_batch(batch) is batch


def test_what_is_kept_of_other_batches_is_said_in_words() -> None:
    """Containers keep their form; other objects are named by their type, whatever they hold."""
    batch = [torch.zeros(2, 3, dtype=torch.float16), (np.zeros(4), object())]
    assert kept_batch(batch) == ["float16[2, 3]", ["float64[4]", "<object>"]]


def test_a_batch_that_cannot_be_read_is_named_by_its_type() -> None:
    """What a container of the user's raises is not for the training."""

    class Gone(list[int]):
        def __getitem__(self, index: object) -> None:  # type: ignore[override]
            raise OSError("gone")

    assert kept_batch(Gone()) == "<Gone>"
    assert kept_batch({"a": Gone()}) == "<dict>"
