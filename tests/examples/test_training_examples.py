"""The examples of the ways into a training run as they are, and are short."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from gradtrack.capture.replay import replay_step

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL: dict[str, dict[str, Any]] = {
    "plain_loop": {"steps": 20},
    "lightning_callback": {"steps": 12},
    "hugging_face": {"steps": 4},
    "stable_baselines3_ppo": {"timesteps": 512, "verbose": 0},
    "gan": {"steps": 12},
    "lstm": {"steps": 9},
    "gpt": {"steps": 9},
    "custom_analyzer": {"steps": 6},
}
NEEDS = {
    "plain_loop": "tensorboard",
    "lightning_callback": "lightning",
    "hugging_face": "transformers",
    "stable_baselines3_ppo": "stable_baselines3",
}
MANAGEMENT = (
    "basic_clipping",
    "nan_inf_handling",
    "adaptive_clipping",
    "health_monitoring",
    "integrated_training",
    "visualization",
    "safe_backward_utility",
)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", SMALL)
def test_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each trains, has reports and prints something."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    path = EXAMPLES / f"{name}.py"
    found = runpy.run_path(str(path))["main"](**SMALL[name])
    assert found.reports
    assert capsys.readouterr().out


def test_the_step_that_breaks_is_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example that breaks on purpose is captured, and the replay names its division."""
    example = EXAMPLES / "broken_step.py"
    runpy.run_path(str(example))["train"](str(tmp_path))
    assert "step 21 was skipped" in capsys.readouterr().out
    found = replay_step(tmp_path / "capture-00021", f"{example}:make")
    assert "x.std(0)" in str(found)


def test_every_example_is_short_and_is_run() -> None:
    """None is longer than a screen and a half but the two scripts of seven, and a test names each."""
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("test_*.py"))
    for path in EXAMPLES.rglob("*.py"):
        of_seven = path.stem in ("gradient_management_example", "example_gradient_monitor")
        assert len(path.read_text(encoding="utf-8").splitlines()) < (140 if of_seven else 80), path.name
        assert f'"{path.relative_to(EXAMPLES).parts[0].removesuffix(".py")}' in tests, path.name


@pytest.mark.parametrize("name", MANAGEMENT)
def test_examples_of_managing_gradients_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of the seven examples runs and prints what it shows."""
    if name == "visualization":
        pytest.importorskip("matplotlib")
    examples = runpy.run_path(str(EXAMPLES / "gradient_management_example.py"))["EXAMPLES"]
    assert set(examples) == set(MANAGEMENT)
    examples[name]()
    assert capsys.readouterr().out
