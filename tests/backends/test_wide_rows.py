"""Rows of thousands of metrics and names of any kind reach every tracker whole, and read back by their names."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from gradtrack.backends.base import Backend
from gradtrack.delivery.delivery import Delivery
from gradtrack.delivery.journal.reading import find_journals
from gradtrack.delivery.journal.writing import Journal
from gradtrack.records import Record, RunInfo
from tests.backends.stores import empty_store
from tests.backends.test_all_trackers import in_mlflow, in_tensorboard, in_wandb

for needed in ("mlflow", "tensorboard", "wandb"):
    pytest.importorskip(needed)

from gradtrack.backends.mlflow import MlflowBackend  # noqa: E402
from gradtrack.backends.tensorboard import TensorBoardBackend  # noqa: E402
from gradtrack.backends.tensorboard.events import tag_of  # noqa: E402
from gradtrack.backends.wandb import WandbBackend  # noqa: E402

HOSTILE = [
    *("a[0]", "a|b", "../x", "/x", "a//b", ".", "a\nb", "a\0b", "a b ", " ", "-", "_step", "_", "a.b", "a:b"),
    *("é", "e\u0301", "中" * 250, "\U0001f600", "\ud800", "\u202ertl", "<script>alert(1)</script>", "'; drop table x;"),
    *("x" * 250, "x" * 251, "y" * 10_000, "y" * 9_999 + "z", f"layer.{'block.' * 100}weight", "con", "CON", "%s{}"),
    *("train/*", "gradtrack/step/x", "gradtrack/exact/x", "a-gt0123456789ab"),
]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def rows() -> list[Record]:
    """Return a row of hostile names, one of five thousand metrics, the names again, and a usual row."""
    names = {name: float(index) for index, name in enumerate(HOSTILE)}
    wide = {f"encoder.layers.{index}.self_attn.out_proj/{'w' * 40}": float(index) for index in range(5000)}
    later = {name: value + 0.5 for name, value in names.items()}
    metrics = [names, wide, later, {"train/grad_norm": 1.0}]
    return [Record(step=step, time=1_700_000_000.0 + step, metrics=one) for step, one in enumerate(metrics, start=1)]


def expected() -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) by metric."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in rows():
        for name, value in record.metrics.items():
            found.setdefault(name, []).append((record.step, value))
    return found


def deliver(directory: Path, backend: Backend) -> None:
    """Send the rows through a delivery that has a configuration with very long values."""
    config: dict[str, Any] = {"groups": {f"group{index}": "x" * 100 for index in range(100)}, "odd": "\ud800"}
    run = RunInfo(run_id="wide", run_dir=str(directory), created=1.0, config=config)
    delivery = Delivery({"it": backend}, run=run, journal=Journal(directory, run), close_timeout_seconds=100.0)
    for record in rows():
        delivery.write(record)
    delivery.close()
    found = delivery.status()["it"]
    assert (found["acknowledged"], found["why"]) == (4, None)
    (journal,) = find_journals(directory)
    plain = [dataclasses.replace(record, run=None) for record in rows()]
    assert [record for _, record in journal.rows()] == plain


def test_case_18_tensorboard_takes_any_name(tmp_path: Path) -> None:
    """Every name is a tag of its own; what is no Unicode is spelled out."""
    deliver(tmp_path / "run", TensorBoardBackend(log_dir=tmp_path / "logs"))
    wanted = {tag_of(name): points for name, points in expected().items()}
    assert len(wanted) == len(expected())
    found = in_tensorboard(tmp_path / "logs")
    assert found == {name: points for name, points in wanted.items() if not name.startswith("gradtrack/")}


@pytest.mark.slow
def test_case_18_mlflow_takes_any_name(tmp_path: Path) -> None:
    """Every name has a metric of its own, also beyond 250 characters, and no long value stops the run."""
    address = f"sqlite:///{tmp_path}/store.db"
    (tmp_path / "store.db").write_bytes(empty_store().read_bytes())
    backend = MlflowBackend(tracking_uri=address, experiment="wide")
    deliver(tmp_path / "run", backend)
    assert backend.run_id is not None
    names = [*HOSTILE, *list(rows()[1].metrics)[::500]]
    found = in_mlflow(address, backend.run_id, names)
    assert found == {name: expected()[name] for name in names}


@pytest.mark.slow
def test_case_18_wandb_takes_any_name(tmp_path: Path) -> None:
    """Every name has a column of its own in the run's file."""
    backend = WandbBackend(project="wide", directory=str(tmp_path))
    deliver(tmp_path / "run", backend)
    names = list(expected())
    found = in_wandb(Path(backend.run.dir).parent, names)
    assert found == {name: expected()[name] for name in names}
    assert all(math.isfinite(value) for points in found.values() for _, value in points)
