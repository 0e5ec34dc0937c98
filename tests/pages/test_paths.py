"""What lies in a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradtrack import registry
from gradtrack.delivery.journal.writing import Journal
from gradtrack.pages.paths import listing, way_to_open, ways_to_open
from gradtrack.records import RunInfo
from tests.pages.runs import row


def test_only_files_that_are_there_are_named(tmp_path: Path) -> None:
    """Every file that a person may want is named with how to open it, and no other."""
    assert ways_to_open(tmp_path) == []
    (tmp_path / "report.html").touch()
    (tmp_path / "unknown.bin").touch()
    assert [(path.name, "browser" in way) for path, way in ways_to_open(tmp_path)] == [("report.html", True)]


def test_files_of_pairs_are_named(tmp_path: Path) -> None:
    """What each pair of a run has of its own is named as well."""
    names = ["gradient_flow.generator.png", "gradient_statistics.critic.json"]
    for name in names:
        (tmp_path / name).touch()
    assert sorted(path.name for path, _ in ways_to_open(tmp_path)) == names


def test_tensorboard_is_pointed_at_the_highest_directory(tmp_path: Path) -> None:
    """Event files below event files belong to one call of TensorBoard."""
    for name in ("board", "board/custom", "my other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.out.tfevents.1").touch()
    ways = dict(ways_to_open(tmp_path))
    assert list(ways) == [tmp_path / "board", tmp_path / "my other"]
    assert ways[tmp_path / "my other"] == "tensorboard --logdir 'my other'"


def test_a_directory_elsewhere_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command works from where the person is."""
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "events.out.tfevents.1").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert listing(tmp_path) == [f"board  tensorboard --logdir {tmp_path}/board"]


def test_trackers_without_a_server_are_named(tmp_path: Path) -> None:
    """An offline run of W&B and MLflow's local store, which lies elsewhere, are named with their commands."""
    directory = tmp_path / "run"
    (directory / "wandb" / "offline-run-1").mkdir(parents=True)
    store = tmp_path / "mlflow.db"
    store.touch()
    options = {"tracking_uri": f"sqlite:///{store}"}
    journal = Journal(directory, RunInfo(run_id="a-run"), backends=[{"name": "mlflow", "options": options}])
    assert journal.append(0, row(1))
    journal.close(5.0)
    wandb, mlflow = listing(directory)
    assert wandb.startswith("wandb/offline-run-1")
    assert "wandb leet run" in wandb
    assert mlflow.split("  ") == [str(store), f"mlflow ui --backend-store-uri sqlite:///{store}"]


def test_names_in_a_listing_stand_below_each_other(tmp_path: Path) -> None:
    """The ways to open begin in one column."""
    for name in ("report.html", "training_log.json"):
        (tmp_path / name).touch()
    first, second = listing(tmp_path)
    assert first.index("browser") == second.index("json.load")


def test_the_picture_of_each_analyzer_is_described() -> None:
    """An analyzer that draws says what its picture shows, which a list of files and the page have from there."""
    for analyzer in map(registry.analyzers.load, registry.analyzers.builtin()):
        draws = "pictures" in vars(analyzer)
        assert draws == (analyzer.picture is not None)
        if analyzer.picture is not None:
            assert way_to_open(f"{analyzer.picture.name}.critic.png") == f"image: {analyzer.picture.about}"
