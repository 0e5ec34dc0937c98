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


def test_a_typo_is_named() -> None:
    """The error has the nearest setting that there is."""
    with pytest.raises(ValueError, match="Did you mean 'max_grad_norm'"):
        run("init_args: {config: {max_gradnorm: 0.05}}")
