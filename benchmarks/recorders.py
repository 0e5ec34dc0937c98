"""What settings that are off by default add to a training step: two models, each in turns without, and with each one.

The processor time of the training's thread at the lower quartile counts, and torch has one thread: on a shared machine
the slower steps show other processes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.timing import Action, Row
from gradtrack import GradientManager, safe_backward

LAYERS = {"mlp_9k": [64, 64, 64, 10], "mlp_1m": [512] * 5}
SETTINGS: dict[str, dict[str, Any]] = {
    "off": {},
    "capture": {"capture": "nonfinite"},
    "fingerprints of every step": {"fingerprints": 1, "fingerprints_max_bytes": 10**10},
    "fingerprints of every 100th step": {"fingerprints": 100},
    "spikes left out": {"spike_action": "skip"},
    "limits of two groups": {"max_grad_norm": {"0.*": 1.0, "2.*": 1.0}},
    "analyzer precision": {"analyzers": ["precision"]},
}
ROUNDS = 600


def run(quick: bool = False) -> Iterator[Row]:
    """Compare the median step with each setting with that of a manager without any."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, widths in LAYERS.items():
        with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
            ways = {
                way: _training(widths, Path(directory) / str(place), stack, settings)
                for place, (way, settings) in enumerate(SETTINGS.items())
            }
            found = _times(ways, rounds=ROUNDS // (5 if quick else 1))
            stack.close()
        off = found.pop("off")
        for way, seconds in found.items():
            yield Row(
                benchmark="recorders",
                case=f"{name}, {way}",
                what="step / step with gradtrack alone",
                ratio=seconds / off,
                note=f"{(seconds - off) * 1e6:+.0f} us on {off * 1e6:.0f} us",
            )
    torch.set_num_threads(threads)


def _times(ways: dict[str, Action], *, rounds: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-20, rounds):
        for name, step in ways.items():
            start = time.thread_time()
            step()
            taken[name] += [time.thread_time() - start] if turn >= 0 else []
    return {name: statistics.quantiles(times, n=4)[0] for name, times in taken.items()}


def _training(widths: list[int], run_dir: Path, stack: ExitStack, settings: dict[str, Any]) -> Action:
    torch.manual_seed(0)
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    manager = stack.enter_context(GradientManager(run_dir=run_dir, save_gradient_plots=False, **settings))
    manager.attach(model, optimizer)
    x = torch.randn(64, widths[0])

    def step() -> None:
        optimizer.zero_grad()
        safe_backward(model(x).square().mean(), model, optimizer, manager, batch=x)
        optimizer.step()

    return step
