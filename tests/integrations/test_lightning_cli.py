"""The callback for Lightning in a LightningCLI, whose configuration names it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("jsonargparse")
import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI

from gradtrack import GradientConfig
from gradtrack.integrations.lightning import GradientStatisticsCallback
from tests.integrations.test_lightning import Tagger, loader

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)
CONFIG = """
    trainer:
      accelerator: cpu
      max_steps: 6
      enable_progress_bar: false
      enable_model_summary: false
      logger: {class_path: CSVLogger, init_args: {save_dir: logs}}
      callbacks:
        - class_path: gradtrack.integrations.lightning.GradientStatisticsCallback
"""
SETTINGS = {
    "arguments": "init_args: {grad_log_every_n_steps: 2}",
    "mapping": "init_args: {grad_log_every_n_steps: 2, config: {max_grad_norm: 0.05}}",
    "settings": "init_args: {grad_log_every_n_steps: 2, max_grad_norm: 0.05, mute: [DEAD]}",
    "file": "init_args: {grad_log_every_n_steps: 2, config: gradtrack.yaml}",
    "more": "init_args: {grad_log_every_n_steps: 2}\n          dict_kwargs: {max_grad_norm: 0.05}",
}


class Data(pl.LightningDataModule):  # type: ignore[misc]
    """Four batches."""

    def train_dataloader(self) -> Any:
        """Return them."""
        return loader()


def run(settings: str) -> GradientStatisticsCallback:
    """Train as the command line does, from a YAML file, and return the callback that the file asks for."""
    Path("config.yaml").write_text(textwrap.dedent(CONFIG) + f"      {settings}\n".replace("          ", "      "))
    trained = LightningCLI(Tagger, Data, args=["fit", "--config", "config.yaml"])
    (callback,) = (found for found in trained.trainer.callbacks if isinstance(found, GradientStatisticsCallback))
    return callback


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_configuration_names_the_callback(kind: str) -> None:
    """Its arguments, a mapping, a file or more keywords are its settings; the files lie in the logger's directory."""
    Path("gradtrack.yaml").write_text("gradtrack: {max_grad_norm: 0.05}")
    callback = run(SETTINGS[kind])
    assert [report.step for report in callback.reports] == [1, 2, 3, 4, 5, 6]
    assert callback.reports[0].clipping.enabled == (kind != "arguments")
    assert callback.reports[0].clipping.threshold == (None if kind == "arguments" else 0.05)
    (statistics,) = Path("logs").rglob("gradient_statistics.json")
    assert json.loads(statistics.read_text())["step"] == [1, 2, 4, 6]
    assert (statistics.parent / "config.yaml").exists()


ONE_FILE = """
gradtrack:
  max_grad_norm: 0.05
  grad_log_every_n_steps: 2
  analyzers: [flow, {name: recurrent, every: 10, step_functions: {core: ["torch:add", 3]}}]
  backends: [{name: json}, console]
  groups: {encoder: "encoder.*"}
"""


def test_one_file_is_read_alike_by_gradtrack_and_lightning() -> None:
    """The same YAML configures a manager by its path, and the callback that LightningCLI makes."""
    Path("gradtrack.yaml").write_text(ONE_FILE)
    config = GradientConfig.load("gradtrack.yaml")
    assert (config.max_grad_norm, config.grad_log_every_n_steps, len(config.analyzers)) == (0.05, 2, 2)
    Path("config.yaml").write_text(textwrap.dedent(CONFIG) + "      init_args: {config: gradtrack.yaml}\n")
    made = LightningCLI(Tagger, Data, args=["--config", "config.yaml"], run=False)
    (callback,) = (found for found in made.trainer.callbacks if isinstance(found, GradientStatisticsCallback))
    assert callback._config.model_dump() == config.model_dump()


def test_the_same_file_is_a_part_of_a_hydra_program() -> None:
    """A program that composes it passes the part below its key, with the same settings."""
    hydra = pytest.importorskip("hydra")
    Path("gradtrack.yaml").write_text(ONE_FILE)
    Path("program.yaml").write_text("defaults: [gradtrack, _self_]\nlr: 0.1\n")
    with hydra.initialize_config_dir(str(Path.cwd()), version_base=None):
        composed = hydra.compose("program")
    assert GradientConfig.load(composed.gradtrack).model_dump() == GradientConfig.load("gradtrack.yaml").model_dump()


def test_a_typo_is_named() -> None:
    """The error has the nearest setting that there is."""
    with pytest.raises(ValueError, match="Did you mean 'max_grad_norm'"):
        run("init_args: {config: {max_gradnorm: 0.05}}")
