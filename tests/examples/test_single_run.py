"""The example that trains from one YAML file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

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


def test_a_key_of_nobody_is_an_error(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo is named, whichever side it was meant for."""
    with pytest.raises(SystemExit):
        example.main(["--config", shortened(tmp_path, grad_log_evry_n_steps=3)])
    assert "unknown keys: grad_log_evry_n_steps" in capsys.readouterr().err
