"""What a tracker that is down costs the training thread."""

from __future__ import annotations

import logging
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.shapes import SHAPES, Parameters
from benchmarks.timing import Action, Row, interleaved
from gradtrack import GradientManager

BAR_MICROSECONDS = 100.0


def run(quick: bool = False) -> Iterator[Row]:
    """Compare steps that record to a dead MLflow server with steps that record to memory."""
    logging.getLogger("gradtrack").setLevel(logging.CRITICAL)
    with socket.socket() as held, tempfile.TemporaryDirectory() as directory:
        held.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
        uri = f"http://127.0.0.1:{held.getsockname()[1]}"
        dead = {"name": "mlflow", "tracking_uri": uri, "run_id": "0" * 32}
        managers = {
            "memory": GradientManager(backends=["memory"], grad_log_every_n_steps=1),
            "dead": GradientManager(
                backends=[dead], grad_log_every_n_steps=1, run_dir=Path(directory), close_timeout_seconds=0.5
            ),
        }
        found = interleaved({name: _step(manager) for name, manager in managers.items()}, rounds=200 if quick else 2000)
        for manager in managers.values():
            manager.close()
    extra = (found["dead"] - found["memory"]) * 1e6
    yield Row(
        benchmark="dead server",
        case="policy_25k, MLflow down, a row at every step",
        what="more than memory",
        ratio=extra,
        bar=BAR_MICROSECONDS,
        unit=" us",
    )
    logging.getLogger("gradtrack").setLevel(logging.NOTSET)


def _step(manager: GradientManager) -> Action:
    model = Parameters(SHAPES["policy_25k"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda: manager.step(model, optimizer, None, backward=False)
