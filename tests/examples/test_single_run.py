"""The example that trains from one YAML file."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.backends.history import rows_of
from tests.backends.stores import empty_store
from tests.processes import python

ROOT = Path(__file__).parent.parent.parent
CONFIG = ROOT / "examples" / "configs" / "mts.yaml"


@pytest.fixture
def example() -> ModuleType:
    """Load the script."""
    spec = importlib.util.spec_from_file_location("single_run", ROOT / "examples" / "single_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown_by(tracker: str) -> dict[int, float]:
    """Run the script as a person would, with one word of the YAML replaced, and read the norms back."""
    text = CONFIG.read_text(encoding="utf-8").replace("steps: 600", "steps: 40") + "close_timeout_seconds: 90\n"
    Path("mts.yaml").write_text(text.replace("[json, tensorboard]", f"[json, {tracker}]"), encoding="utf-8")
    result = python(str(ROOT / "examples" / "single_run.py"), "--config", "mts.yaml")
    assert result.returncode == 0, result.stderr
    assert "Trained for 40 steps" in result.stdout
    assert tracker in result.stdout.partition("Files in")[2]
    return READERS[tracker]()


def in_tensorboard() -> dict[int, float]:
    """Read the event files as TensorBoard does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("gradtrack_runs/mts/tensorboard", size_guidance={"scalars": 0}).Reload()
    assert {"rnn/spectral_radius", "train/grad_variance/W_rec"} <= set(events.Tags()["scalars"])
    return {event.step: event.value for event in events.Scalars("train/grad_norm")}


def in_wandb() -> dict[int, float]:
    """Read the only run's own file."""
    (directory,) = Path("gradtrack_runs/mts/wandb").glob("offline-run-*")
    rows = rows_of(directory)
    assert any("train/grad_variance/W_rec" in row for row in rows)
    return {row["gradtrack/step"]: row["train/grad_norm"] for row in rows if "train/grad_norm" in row}


def in_mlflow() -> dict[int, float]:
    """Ask the store that MLflow takes by default for its only run."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri="sqlite:///mlflow.db")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert "train/grad_variance/W_rec" in run.data.metrics
    assert run.info.status == "FINISHED"
    return {point.step: point.value for point in client.get_metric_history(run.info.run_id, "train/grad_norm")}


READERS = {"tensorboard": in_tensorboard, "wandb": in_wandb, "mlflow": in_mlflow}


def shortened(path: Path, **changes: Any) -> str:
    """Write the example's configuration with some changes, and fewer steps."""
    values = yaml.safe_load(CONFIG.read_text(encoding="utf-8")) | {"steps": 40, "run_dir": str(path / "run")} | changes
    (path / "mts.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path / "mts.yaml")


def test_run_leaves_its_statistics_and_its_report(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys of both sides take effect, and the files that people expect are there."""
    example.main(["--config", shortened(tmp_path)])
    statistics = json.loads((tmp_path / "run" / "gradient_statistics.json").read_text())
    assert {20, 40} <= set(statistics["step"])
    matrices = json.loads((tmp_path / "run" / "gradient_statistics_weight_matrices.json").read_text())
    assert set(matrices) == {"W_in", "W_rec", "W_out", "W_h_init", "biases"}
    for name in ("gradient_statistics.png", "report.html"):
        assert (tmp_path / "run" / name).is_file()
    assert "Trained for 40 steps" in capsys.readouterr().out


@pytest.mark.parametrize("tracker", READERS)
def test_one_word_chooses_the_tracker(tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each tracker there is one run with every recorded step, beside the files in the run's directory."""
    pytest.importorskip(tracker)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if tracker == "mlflow":
        shutil.copy(empty_store(), "mlflow.db")
    shown = shown_by(tracker)
    statistics = json.loads(Path("gradtrack_runs/mts/gradient_statistics.json").read_text())
    assert {20, 40} <= set(shown)
    assert shown == pytest.approx(dict(zip(statistics["step"], statistics["grad_norm"], strict=True)), rel=1e-6)


def test_a_second_run_in_the_same_directory_leaves_the_first_alone(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example can be run again as it is: each run has files of its own, and no step is there twice."""
    for steps in (60, 40):
        example.main(["--config", shortened(tmp_path, steps=steps, backends=["json"])])
    files = [tmp_path / "run" / "gradient_statistics.json", *(tmp_path / "run").glob("*/gradient_statistics.json")]
    found = [json.loads(path.read_text())["step"] for path in files]
    assert [steps[-1] for steps in found] == [60, 40]
    assert all(steps == sorted(set(steps)) for steps in found)


def test_a_key_of_nobody_is_an_error(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo is named, whichever side it was meant for."""
    with pytest.raises(SystemExit):
        example.main(["--config", shortened(tmp_path, grad_log_evry_n_steps=3)])
    assert "unknown keys: grad_log_evry_n_steps" in capsys.readouterr().err
