"""The hardest case: a tiny model that sends its metrics to a tracker at every step."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.models import Training
from benchmarks.servers import faulty_server
from benchmarks.timing import Row
from gradtrack import GradientManager

BARS = {"tensorboard": 1.2, "wandb": 1.4, "mlflow": 1.8, "trackio": None, "otel": None, "callable": None}
STEPS = 1000


def run(quick: bool = False) -> Iterator[Row]:
    """Train with each tracker in turn between plain trainings, and print the time to drain beside it.

    The clock starts when the tracker has taken its first rows. Beside the ratio to the plain step stands that to the
    same steps without a tracker, which is what the emission itself costs.
    """
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_CONSOLE="off")
    steps, turns = (STEPS // 4, 1) if quick else (STEPS, 5)
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ["TRACKIO_DIR"] = home  # which Trackio reads when it is imported
        collector = stack.enter_context(faulty_server(200)).address
        for name, bar in BARS.items():
            yield _compare(name, bar, steps, turns, collector)


def _compare(name: str, bar: float | None, steps: int, turns: int, collector: str) -> Row:
    found = []
    for _ in range(turns):
        silent = _train(steps, GradientManager())[0]
        with tempfile.TemporaryDirectory() as directory:
            os.environ["WANDB_DIR"] = directory
            plain = _train(steps, None)[0]
            ours, drain = _train(steps, GradientManager(**_settings(name, Path(directory), collector)))
            plain = (plain + _train(steps, None)[0]) / 2
        found.append((ours / plain, drain / plain / steps, ours / silent))
    ratio, drain, alone = sorted(found)[len(found) // 2]
    return Row(
        benchmark="emission",
        case=f"mlp, {name} at every step",
        what="whole step / plain step",
        ratio=ratio,
        bar=bar,
        note=f"{alone:.2f} of the steps without a tracker; drained in {drain:.0%} of the training's time",
    )


def _settings(name: str, directory: Path, collector: str) -> dict[str, Any]:
    options: Mapping[str, dict[str, Any]] = {
        "mlflow": {"tracking_uri": f"sqlite:///{directory}/mlflow.db"},
        "wandb": {"project": "benchmarks"},
        "trackio": {"project": "benchmarks"},
        "otel": {"endpoint": f"{collector}/v1/metrics"},
        "callable": {"log": _ignore},
    }
    return {
        "backends": [{"name": name, **options.get(name, {})}],
        "run_dir": directory / "run",
        "grad_log_every_n_steps": 1,
        "close_timeout_seconds": 120.0,
        "save_gradient_plots": False,  # which would be drawn while the rows drain
    }


def _train(steps: int, manager: GradientManager | None) -> tuple[float, float]:
    """Return the seconds of a step, and those of the close."""
    training = Training("mlp")
    for turn in range(steps + 50):
        if turn == 50:
            if manager is not None:
                manager.flush()
            start = time.perf_counter()
        training.optimizer.zero_grad()
        loss = training.forward()
        if manager is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            manager.step(training.model, training.optimizer, loss)
        training.optimizer.step()
    end = time.perf_counter()
    if manager is not None:
        manager.close()
    return (end - start) / steps, time.perf_counter() - end


def _ignore(metrics: Mapping[str, float], step: int) -> None:
    """Take the metrics of a row, as the function of a tracker that costs nothing."""
