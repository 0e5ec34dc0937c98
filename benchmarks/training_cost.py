"""Whole training steps of a small GPT and of a tiny MLP: plain, clipped, watched by us and by others."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import Training
from benchmarks.timing import Action, Row, interleaved
from gradtrack import GradientConfig, GradientManager

ROUNDS = {"gpt": 40, "mlp": 1500}
ALONE = "gradtrack, report every step"
NOTHING = 1.005
"""What emitting every 100 steps may add to a small GPT: nothing that can be measured."""


def run(quick: bool = False) -> Iterator[Row]:
    """Time all candidates of each model in one process, relative to the plain step; a tracker also to us alone."""
    for name in ("gpt", "mlp"):
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            candidates = _candidates(name, Path(directory), stack)
            found = interleaved(candidates, rounds=ROUNDS[name] // (5 if quick else 1), warm=5)
        plain, clip = found["plain"], found["clip_grad_norm_"] - found["plain"]
        for what, seconds in found.items():
            if what == "plain":
                continue
            bar = 1.0 + max(clip / plain, 0.0) if what == ALONE and name == "gpt" else None
            yield Row(benchmark="training", case=name, what=what, ratio=seconds / plain, bar=bar)
            if what.startswith("gradtrack to") and what.endswith("every 100"):
                added, bar = seconds / found[ALONE], NOTHING if name == "gpt" else None
                yield Row(benchmark="training", case=name, what=f"{what} / gradtrack alone", ratio=added, bar=bar)


def _candidates(name: str, directory: Path, stack: ExitStack) -> dict[str, Action]:
    training = Training(name)  # one for all that hook nothing: copies of a model differ by where they lie in memory

    def ours(**settings: Any) -> Action:
        manager = stack.enter_context(GradientManager(close_timeout_seconds=300.0, **settings))

        def step() -> None:
            training.optimizer.zero_grad()
            manager.step(training.model, training.optimizer, training.forward())
            training.optimizer.step()

        return step

    candidates: dict[str, Action] = {
        "plain": _plain(training),
        "clip_grad_norm_": _clipped(training),
        ALONE: ours(backends=["memory"]),
    }
    for backend in _trackers(directory):
        for every in (100, 1):
            where = {**backend, "run_dir": directory / f"{backend['backends'][0]['name']}{every}"}
            label = f"gradtrack to {backend['backends'][0]['name']}, every {every if every > 1 else 'step'}"
            candidates[label] = ours(grad_log_every_n_steps=every, save_gradient_plots=False, **where)
    candidates |= _peers(name, directory, stack)
    return candidates


def _plain(training: Training) -> Action:
    def step() -> None:
        training.optimizer.zero_grad()
        training.forward().backward()  # type: ignore[no-untyped-call]
        training.optimizer.step()

    return step


def _clipped(training: Training) -> Action:
    def step() -> None:
        training.optimizer.zero_grad()
        training.forward().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), GradientConfig().max_grad_norm)
        training.optimizer.step()

    return step


def _trackers(directory: Path) -> list[dict[str, Any]]:
    os.environ.update(WANDB_MODE="offline", WANDB_DIR=str(directory), WANDB_SILENT="true", WANDB_CONSOLE="off")
    uri = f"sqlite:///{directory}/mlflow.db"
    return [
        {"backends": [{"name": "tensorboard"}]},
        {"backends": [{"name": "wandb", "project": "benchmarks"}]},
        {"backends": [{"name": "mlflow", "tracking_uri": uri}]},
    ]


def _peers(name: str, directory: Path, stack: ExitStack) -> dict[str, Action]:
    """Return what others offer: wandb.watch, and Lightning's norms of all parameters."""
    import wandb
    from lightning.pytorch.utilities import grad_norm

    candidates: dict[str, Action] = {}
    lightning = Training(name)

    def norms() -> None:
        lightning.optimizer.zero_grad()
        lightning.forward().backward()  # type: ignore[no-untyped-call]
        grad_norm(lightning.model, 2)
        lightning.optimizer.step()

    candidates["Lightning grad_norm, every step"] = norms
    run = wandb.init(project="peers", dir=str(directory))  # watch logs to the global run only
    stack.callback(run.finish)
    for every in (1, 100):
        watched = Training(name)
        run.watch(watched.model, log="gradients", log_freq=every, idx=every)
        step = _plain(watched)
        candidates[f"wandb.watch, every {every if every > 1 else 'step'}"] = step
    return candidates
