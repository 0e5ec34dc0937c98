"""The panels in the trackers' real pages, drawn by a real browser."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtrack.backends.mlflow import MlflowBackend
from gradtrack.backends.mlflow.views import saved_view
from gradtrack.backends.tensorboard import TensorBoardBackend
from gradtrack.records import Record, RunInfo
from gradtrack.reports.panels import CORE_PANELS
from tests.backends.conftest import free_port

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = os.environ.get("GRADTRACK_PICTURES")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no browser: install chromium to look at the pages"),
]


def a_training() -> list[Record]:
    """Return the rows of a training that learns, spikes once and meets a few non-finite steps."""
    records = []
    for step in range(1, 301):
        norm = 3.0 * math.exp(-step / 90) + 0.4 + 0.15 * math.sin(step / 3) + (9.0 if step in (120, 121) else 0.0)
        groups = {"W_in": 0.5, "W_rec": 0.8 + 0.1 * math.sin(step / 7), "W_out": 0.3}
        metrics = {
            "train/grad_norm": norm,
            "train/grad_norm_clipped": min(norm, 1.0),
            "train/grad_clip_threshold": 1.0,
            "train/grad_clip_rate": min(1.0, 40 / step),
            "train/grad_nan_count": float(3 * (step in (150, 220))),
            "train/grad_inf_count": float(step == 220),
            "train/grad_mean": 0.01 * math.sin(step / 20),
            "train/grad_min": -norm / 4,
            "train/grad_max": norm / 3,
            "train/grad_healthy": float(step not in (120, 121, 150, 220)),
            "train/grad_skipped": float(step in (150, 220)),
            **{f"train/grad_norm/{name}": share * norm for name, share in groups.items()},
        }
        records.append(Record(step=step, time=1_700_000_000.0 + step, metrics=metrics))
    run = RunInfo(run_id="a-training", created=1_700_000_000.0)
    records[0] = Record(step=1, time=records[0].time, metrics=records[0].metrics, run=run, panels=tuple(CORE_PANELS))
    return records


def look(address: str, picture: Path, *, width: int = 1400, height: int = 1100, patience_ms: int = 15000) -> str:
    """Take a picture of a page and return what its document holds; the first look only fills the browser's cache."""
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
    options += [f"--window-size={width},{height}", f"--virtual-time-budget={patience_ms}"]
    options += [f"--user-data-dir={picture.parent / 'profile'}"]
    document = ""
    for action in (f"--screenshot={picture}", "--dump-dom", f"--screenshot={picture}"):
        command = [CHROMIUM, *options, action, address]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180).stdout
        document = output or document
    return document


def keep(picture: Path, *, width: int) -> None:
    """Store the left part of a picture in the directory that the environment names, where it names one."""
    if PICTURES:
        Path(PICTURES).mkdir(parents=True, exist_ok=True)
        image = pytest.importorskip("PIL.Image")
        with image.open(picture) as found:
            colours = found.convert("RGB").crop((0, 0, width, found.height)).quantize(128)
            colours.save(Path(PICTURES) / picture.name, optimize=True)


def inked(picture: Path) -> int:
    """Count the pixels of a picture that have a strong colour of their own, as curves have."""
    image = pytest.importorskip("PIL.Image")
    with image.open(picture) as found:
        saturation = np.asarray(found.convert("HSV"))[..., 1]
    return int((saturation > 120).sum())


@contextlib.contextmanager
def tensorboard(directory: Path, *, layout: bool) -> Iterator[str]:
    """Serve a directory, and yield the address when the server has read it."""
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", directory.name, "--host", "127.0.0.1"]
    with (directory.parent / "server.log").open("wb") as log:
        server = subprocess.Popen([*command, "--port", str(port)], cwd=directory.parent, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{address}/data/plugin/custom_scalars/layout") as it,
            ):
                if not layout or b"gradients" in it.read():
                    break
            time.sleep(0.2)
        yield address
    finally:
        server.kill()
        server.wait()


def test_tensorboard_draws_the_panels(tmp_path: Path) -> None:
    """The page of custom scalars draws curves for our section, which a run without panels does not have."""
    drawn = {}
    for panels in (True, False):
        directory = tmp_path / ("runs" if panels else "without")
        backend = TensorBoardBackend(log_dir=directory / "training")
        first, *others = a_training()
        backend.write([first if panels else dataclasses.replace(first, panels=()), *others])
        backend.close()
        with tensorboard(directory, layout=panels) as address:
            picture = tmp_path / ("tensorboard.png" if panels else "without.png")
            look(f"{address}/#custom_scalars", picture)
            drawn[panels] = inked(picture)
    assert drawn[True] > drawn[False] + 3000, drawn
    keep(tmp_path / "tensorboard.png", width=1100)


def test_mlflow_draws_the_panels(mlflow_server: str, tmp_path: Path) -> None:
    """The saved view of the experiment shows our section with its charts, under the titles of the panels."""
    mlflow: Any = pytest.importorskip("mlflow")
    backend = MlflowBackend(tracking_uri=mlflow_server, experiment="pages", saved_view=True, run_name="a training")
    backend.write(a_training())
    backend.close()
    experiment = mlflow.MlflowClient(tracking_uri=mlflow_server).get_experiment_by_name("pages")
    view = saved_view([], {}, 0)[0].removeprefix("mlflow.sharedViewState.")
    page = f"{mlflow_server}/#/experiments/{experiment.experiment_id}/runs"
    address = f"{page}?viewStateShareKey={view}&compareRunsMode=CHART"
    document = look(address, tmp_path / "mlflow.png", width=2300, patience_ms=60000)
    assert "gradtrack: gradients" in document
    assert "Share of steps that were clipped" in document
    assert inked(tmp_path / "mlflow.png") > 3000
    keep(tmp_path / "mlflow.png", width=1710)
