"""The callback for Lightning beside each of the trainer's loggers, in the trackers themselves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

pytest.importorskip("lightning")
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from gradtrack.integrations.lightning import GradientStatisticsCallback
from tests.backends.conftest import free_port, served
from tests.backends.history import rows_of
from tests.backends.stores import empty_store
from tests.integrations.test_lightning import fit, norms

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)
Curve = list[tuple[int, float]]


class Tracker(Protocol):
    """A tracker that a logger of Lightning's writes to."""

    def logger(self) -> Any:
        """Return a logger: the first one of a run, or one that goes on with it."""

    def end(self) -> None:
        """End what the user has to end."""

    def curve(self, name: str) -> Curve:
        """Return every point of a metric in the only run there is."""


class InTensorboard:
    """Event files in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def logger(self) -> Any:
        """Go on in the same version."""
        return TensorBoardLogger(str(self.directory), name="logs", version=0)

    def end(self) -> None:
        """Leave it to the logger."""

    def curve(self, name: str) -> Curve:
        """Read every event file; beside the run with scalars there is the layout of the panels, which has none."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = {path.parent for path in self.directory.rglob("*tfevents*")}
        runs = [EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload() for path in found]
        (run,) = (one for one in runs if one.Tags()["scalars"])
        # The names of files of one second do not tell their order: a writer's tenth comes before its ninth.
        by_time = sorted(run.Scalars(name), key=lambda event: event.wall_time)
        return [(event.step, event.value) for event in by_time]


class InMlflow:
    """A store of MLflow, behind a server or not."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.run_id: str | None = None

    def logger(self) -> Any:
        """Go on with the run of before."""
        logger = MLFlowLogger("experiment", tracking_uri=self.uri, run_id=self.run_id)
        self.run_id = logger.run_id
        return logger

    def end(self) -> None:
        """Leave it to the logger."""

    def curve(self, name: str) -> Curve:
        """Ask for the history of the metric."""
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)
        (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
        return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]


class InWandb:
    """Runs of W&B without a server; one that goes on has the same identity in a file of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._last: Any = None

    def logger(self) -> Any:
        """Go on under the same identity."""
        self._last = WandbLogger(project="test", id="one", offline=True, save_dir=str(self.directory))
        return self._last

    def end(self) -> None:
        """Finish the run, which is the user's."""
        self._last.experiment.finish()

    def curve(self, name: str) -> Curve:
        """Read every file of the run."""
        found = sorted((self.directory / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime_ns)
        assert {path.name.split("-")[3] for path in found} == {"one"}  # W&B counts those of one second
        axis = "gradtrack/step" if "grad" in name else "trainer/global_step"
        return [(row[axis], row[name]) for path in found for row in rows_of(path) if name in row]


@pytest.fixture(
    params=[
        "tensorboard",
        "mlflow",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("wandb", "mlflow server")),
    ],
)
def tracker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracker]:
    """Prepare an empty tracker of each kind."""
    kind = str(request.param)
    pytest.importorskip(kind.split()[0])
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")  # the logger sets it for good
    if kind == "tensorboard":
        yield InTensorboard(tmp_path)
    elif kind == "wandb":
        yield InWandb(tmp_path)
    else:
        shutil.copy(empty_store(), tmp_path / "store.db")
        if kind == "mlflow":
            yield InMlflow(f"sqlite:///{tmp_path}/store.db")
        else:
            with served(tmp_path / "store.db", free_port()) as address:
                yield InMlflow(address)


def test_one_run_holds_the_users_metrics_and_ours_and_goes_on(tracker: Tracker, tmp_path: Path) -> None:
    """Every step of both is there once, ours at the trainer's global step, also after a resume."""
    settings: dict[str, Any] = {"save_gradient_plots": False, "close_timeout_seconds": 90}
    whole, first, second = (GradientStatisticsCallback(1, **settings) for _ in range(3))
    fit(whole, tmp_path / "whole", max_steps=-1, max_epochs=2)
    _, trainer = fit(first, tmp_path, max_steps=-1, max_epochs=1, logger=tracker.logger())
    trainer.save_checkpoint(tmp_path / "at4.ckpt")
    tracker.end()
    resumed: dict[str, Any] = {"max_steps": -1, "max_epochs": 2, "ckpt_path": str(tmp_path / "at4.ckpt")}
    _, trainer = fit(second, tmp_path, logger=tracker.logger(), **resumed)
    tracker.end()
    shown = tracker.curve("train/grad_norm")
    assert [step for step, _ in shown] == [1, 2, 3, 4, 5, 6, 7, 8] == list(range(1, trainer.global_step + 1))
    assert dict(shown) == pytest.approx(norms(whole), rel=1e-5)
    for name in {name for report in whole.reports for name in report.metrics()}:
        assert [step for step, _ in tracker.curve(name)] == [step for step, _ in shown], name
    assert len({step for step, _ in tracker.curve("train/loss")}) == len(tracker.curve("train/loss")) == 8
