"""An exception at any line of a framework's callback, as the handler of a signal raises it, leaves no change behind."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.faults.every_line import (
    NUMBERS_OF_POINTS,
    PACKAGE,
    Point,
    Strike,
    Struck,
    ends_of,
    spread,
    watching_lines,
)

pytestmark = pytest.mark.filterwarnings("ignore")
Fit = Callable[[], None]
"""Train for some steps, a second time where it is called again."""


def lightning(directory: Path) -> tuple[Any, list[Any], Fit]:
    """Return a callback of Lightning, what it may change, and a training that it clips."""
    import lightning.pytorch as pl

    from gradtrack.integrations.lightning import GradientStatisticsCallback
    from tests.integrations.test_lightning import Tagger, loader

    callback: Any = GradientStatisticsCallback(max_grad_norm=0.5, engine="torch", backends=["memory"], analyzers=[])
    quiet: dict[str, Any] = dict.fromkeys(
        ("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    module = Tagger()
    trainer = pl.Trainer(
        max_steps=2, accelerator="cpu", logger=False, default_root_dir=str(directory), callbacks=[callback], **quiet
    )

    def fit() -> None:
        trainer.fit_loop.epoch_loop.max_steps += 2 if trainer.global_step else 0
        trainer.fit(module, loader())

    return callback, [trainer, trainer.precision_plugin, module], fit


def transformers(directory: Path) -> tuple[Any, list[Any], Fit]:
    """Return a callback of Hugging Face, what it may change, and a training that its Trainer clips."""
    import transformers as hugging_face

    from gradtrack.integrations.transformers import GradtrackCallback
    from tests.integrations.test_transformers import tiny_model, tokens

    hugging_face.logging.set_verbosity_error()
    callback = GradtrackCallback(engine="torch", backends=["memory"], analyzers=[])
    options: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    args = hugging_face.TrainingArguments(
        str(directory), max_steps=2, logging_steps=1, dataloader_pin_memory=False, **options
    )
    trainer: Any = hugging_face.Trainer(tiny_model(), args, train_dataset=tokens(16), callbacks=[callback])
    return callback, [trainer, trainer.accelerator, trainer.model], trainer.train


def stable_baselines3(name: str, directory: Path) -> tuple[Any, list[Any], Fit]:
    """Return a callback of Stable-Baselines3, what it may change, and an algorithm."""
    from gradtrack.integrations.stable_baselines3 import GradtrackCallback
    from tests.integrations.test_stable_baselines3 import algorithm

    callback = GradtrackCallback(engine="torch", backends=["memory"])
    model = algorithm(name)
    actor = [model.policy.actor] if name == "SAC" else []
    return callback, [model, model.policy, *actor], lambda: model.learn(24, callback=callback)


FRAMEWORKS: dict[str, Callable[[Path], tuple[Any, list[Any], Fit]]] = {
    "lightning": lightning,
    "transformers": transformers,
    "stable_baselines3 (A2C)": functools.partial(stable_baselines3, "A2C"),
    "stable_baselines3 (SAC)": functools.partial(stable_baselines3, "SAC"),
}


def is_ours(value: Any) -> bool:
    """Say whether a function is one of gradtrack's."""
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(PACKAGE)


def left_behind(owners: list[Any]) -> Iterator[str]:
    """Name every function of gradtrack that stands in for a method, or is a hook."""
    modules = [part for one in owners if isinstance(one, nn.Module) for part in one.modules()]
    params = [param for module in modules for param in module.parameters(recurse=False)]
    steppers = [one for owner in [*owners, *modules] for one in vars(owner).values() if hasattr(one, "param_groups")]
    optimizers = [*steppers, *(one.optimizer for one in steppers if hasattr(one, "optimizer"))]
    torchs = [sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]]
    for owner in [*owners, *modules, *params, *optimizers, *torchs]:
        found = {name: getattr(owner, name, None) for name in dir(owner) if "_hooks" in name}
        tables = {
            f"{name}[{key}]": hook
            for name, table in found.items()
            if isinstance(table, dict)
            for key, hook in table.items()
        }
        for name, value in {**getattr(owner, "__dict__", {}), **tables}.items():
            if is_ours(value):
                yield f"{name} of {type(owner).__name__}"


def strike(framework: str, directory: Path, point: Point) -> None:
    """Let an exception strike once, look for what it has left behind, and train on."""
    raiser = Strike(point)
    callback, owners, fit = FRAMEWORKS[framework](directory)
    with watching_lines(raiser), contextlib.suppress(Struck):
        fit()
    assert raiser.struck, f"{point}: was not reached"
    left = list(left_behind(owners))
    assert not left, f"{point}: {left}"
    assert callback._manager is None or callback.manager.status()["closed"], f"{point}: the manager is open"
    fit()
    assert callback.reports, f"{point}: the next training is not watched"
    left = list(left_behind(owners))
    assert not left, f"{point}, then another training: {left}"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("num_points", NUMBERS_OF_POINTS)
def test_exception_at_any_line_of_a_callback_leaves_nothing(framework: str, num_points: int, tmp_path: Path) -> None:
    """No hook and no replaced method stays, the manager is closed, and the next training is watched."""
    pytest.importorskip(framework.partition(" ")[0])
    points: list[Point] = []
    _, owners, fit = FRAMEWORKS[framework](tmp_path)
    with watching_lines(points.append):
        fit()
    assert not list(left_behind(owners))
    found = ends_of([point for point in points if "/integrations/" in point.file])
    assert len(found) > 50
    for point in spread(found, num_points):
        strike(framework, tmp_path, point)
