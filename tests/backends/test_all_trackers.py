"""One training recorded by all three trackers at once, read back and held against the journal."""

from __future__ import annotations

import dataclasses
import importlib
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from gradtrack import GradientManager
from gradtrack.delivery.journal.reading import find_journals
from gradtrack.delivery.replay import replay
from gradtrack.records import Record
from tests.backends.history import rows_of
from tests.backends.stores import empty_store
from tests.training import batch_loss, optimizer_of, small_model

for needed in ("mlflow", "tensorboard", "wandb"):
    pytest.importorskip(needed)

from gradtrack.backends.mlflow import MlflowBackend  # noqa: E402
from gradtrack.backends.mlflow.store import metric_name  # noqa: E402
from gradtrack.backends.wandb.columns import metric_name as wandb_name  # noqa: E402

Series = dict[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def _trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def train(steps: int, backends: list[Any], run_dir: Path, **settings: Any) -> GradientManager:
    """Train a small model with a burst of gradients that are not finite, and a row for every step."""
    model = small_model()
    optimizer = optimizer_of(model)
    with GradientManager(
        backends=backends, run_dir=run_dir, grad_log_every_n_steps=1, close_timeout_seconds=60.0, **settings
    ) as manager:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            manager.step(model, optimizer, batch_loss(model, step, math.inf if step % 100 == 50 else 1.0))
            optimizer.step()
    return manager


def journaled(run_dir: Path) -> list[Record]:
    """Return the rows that the journal holds."""
    (journal,) = find_journals(run_dir)
    return [record for _, record in journal.rows()]


def series_of(records: list[Record]) -> Series:
    """Return (step, value) by metric."""
    found: Series = {}
    for record in records:
        for name, value in record.metrics.items():
            found.setdefault(name, []).append((record.step, value))
    return found


def text(series: Series) -> dict[str, str]:
    """Return series in a form in which NaN equals NaN."""
    return {name: repr([(step, float(value)) for step, value in rows]) for name, rows in series.items()}


def in_tensorboard(directory: Path) -> Series:
    """Return every scalar that the classical reader finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    names = [name for name in reader.Tags()["scalars"] if not name.startswith("gradtrack/")]
    return {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in names}


def in_mlflow(address: str, run_id: str, names: list[str]) -> Series:
    """Return the history of every metric."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=address)
    histories = {name: client.get_metric_history(run_id, metric_name(name)) for name in names}
    return {name: sorted((point.step, point.value) for point in found) for name, found in histories.items()}


def in_wandb(directory: Path, names: list[str]) -> Series:
    """Return what both readers of the file agree on."""
    rows = rows_of(directory)
    keys = {name: wandb_name(name) for name in names}
    return {name: [(row["gradtrack/step"], row[key]) for row in rows if key in row] for name, key in keys.items()}


def single(value: float) -> float:
    """Round to the float that TensorBoard shows."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def largest(value: float) -> float:
    """Return what MLflow keeps for a value."""
    return math.copysign(1.7976931348623157e308, value) if math.isinf(value) else value


@pytest.mark.slow
def test_thousand_steps_read_back_as_journaled(mlflow_server: str, tmp_path: Path) -> None:
    """Every metric of every step is in each tracker exactly once, with the journal's value."""
    backends: list[Any] = [
        {"name": "tensorboard", "log_dir": tmp_path / "logs"},
        {"name": "mlflow", "tracking_uri": mlflow_server, "experiment": "all trackers"},
        {"name": "wandb", "project": "all-trackers", "directory": str(tmp_path)},
    ]
    manager = train(1000, backends, tmp_path / "run")
    records = journaled(tmp_path / "run")
    assert [record.step for record in records] == list(range(1, 1001))
    series = series_of(records)
    names = list(series)
    floats = {name: [(step, single(value)) for step, value in rows] for name, rows in series.items()}
    assert text(in_tensorboard(tmp_path / "logs")) == text(floats)
    mlflow: Any = manager.backend("mlflow")
    stored = {name: [(step, largest(value)) for step, value in rows] for name, rows in series.items()}
    assert text(in_mlflow(mlflow_server, mlflow.run_id, names)) == text(stored)
    wandb: Any = manager.backend("wandb")
    assert text(in_wandb(Path(wandb.run.dir).parent, names)) == text(series)
    assert {name: found["acknowledged"] for name, found in manager.status()["backends"].items()} == {
        "tensorboard": 1000,
        "mlflow": 1000,
        "wandb": 1000,
    }


def test_replay_completes_what_a_tracker_missed(mlflow_server: str, tmp_path: Path) -> None:
    """Rows that were never sent reach all three trackers by replay, each once, however often it is called."""
    train(20, ["json"], tmp_path / "run")
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"log_dir": str(tmp_path / "logs")},
        "mlflow": {"tracking_uri": mlflow_server, "experiment": "replayed"},
        "wandb": {"run_id": "replayed", "project": "p", "directory": str(tmp_path)},
    }
    for name, given in options.items():
        for expected in (20, 0):
            (done,) = replay(tmp_path / "run", to=name, options=given)
            assert (done.complete, done.delivered) == (True, expected), (name, done)
    series = series_of(journaled(tmp_path / "run"))
    assert [step for step, _ in in_tensorboard(tmp_path / "logs")["train/grad_norm"]] == list(range(1, 21))
    (directory,) = (tmp_path / "wandb").glob("offline-run-*-replayed")
    assert text(in_wandb(directory, list(series))) == text(series)
    (journal,) = find_journals(tmp_path / "run")
    first, *others = journaled(tmp_path / "run")
    probe = MlflowBackend(tracking_uri=mlflow_server, experiment="replayed")
    assert len(probe.present([dataclasses.replace(first, run=journal.run), *others]) or ()) == 20


def test_histograms_of_a_training_read_back_as_journaled(tmp_path: Path) -> None:
    """With `log_histograms` TensorBoard and W&B hold the counts of the journal, bucket by bucket."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    backends: list[Any] = [
        {"name": "tensorboard", "log_dir": tmp_path / "logs"},
        {"name": "wandb", "project": "histograms", "directory": str(tmp_path)},
    ]
    manager = train(4, backends, tmp_path / "run", log_histograms=True)
    records = journaled(tmp_path / "run")
    names = {"train/grad_histogram", "train/grad_histogram/0", "train/grad_histogram/2"}
    assert all(set(record.histograms) == names for record in records)
    reader = EventAccumulator(str(tmp_path / "logs"), size_guidance={"histograms": 0}).Reload()
    wandb: Any = manager.backend("wandb")
    rows = {row["gradtrack/step"]: row for row in rows_of(Path(wandb.run.dir).parent) if "gradtrack/step" in row}
    for name in names:
        shown = {event.step: event.histogram_value for event in reader.Histograms(name)}
        for record in records:
            found = record.histograms[name]
            assert tuple(shown[record.step].bucket) == found.counts
            assert (shown[record.step].min, *shown[record.step].bucket_limit) == found.edges
            row = rows[record.step]
            assert (tuple(row[f"{name}.values"]), tuple(row[f"{name}.bins"])) == (found.counts, found.edges)


def test_moved_run_is_not_delivered_again(tmp_path: Path) -> None:
    """A run directory that was moved has its TensorBoard and W&B files with it, and replays find every row there."""
    train(20, ["tensorboard", {"name": "wandb", "project": "p"}], tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    for _ in range(2):
        for done in replay(tmp_path / "new"):
            assert (done.complete, done.present, done.delivered) == (True, 20, 0), done
    assert not (tmp_path / "old").exists()


def test_run_that_an_address_does_not_know_is_made_there(tmp_path: Path) -> None:
    """A replay to another MLflow server than the run's makes a run there, once, and both have every row."""
    addresses = [f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")]
    for name in ("first", "second"):
        shutil.copy(empty_store(), tmp_path / f"{name}.db")
    train(5, [{"name": "mlflow", "tracking_uri": addresses[0], "own_process": False}], tmp_path / "run")
    told = [(addresses[1], 5), (addresses[1], 0), (addresses[0], 0), (None, 0)]
    for address, delivered in told:
        (done,) = replay(tmp_path / "run", tracking_uri=address, allowed=[tmp_path])
        assert (done.complete, done.delivered) == (True, delivered), (address, done)


def test_replay_elsewhere_does_not_forget_where_the_run_is(tmp_path: Path) -> None:
    """A run of the user's own, to which only its number leads, is found again after a replay to another server."""
    addresses = [f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")]
    for name in ("first", "second"):
        shutil.copy(empty_store(), tmp_path / f"{name}.db")
    client: Any = importlib.import_module("mlflow").MlflowClient(addresses[0])
    theirs = {"tracking_uri": addresses[0], "run_id": client.create_run("0").info.run_id}
    train(5, [{"name": "mlflow", "own_process": False, **theirs}], tmp_path / "run")
    for address, delivered in ((addresses[1], 5), (addresses[0], 0), (None, 0)):
        (done,) = replay(tmp_path / "run", tracking_uri=address, allowed=[tmp_path])
        assert (done.complete, done.delivered) == (True, delivered), (address, done)
    assert len(client.search_runs(["0"])) == 1
