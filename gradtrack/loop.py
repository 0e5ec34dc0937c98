"""The entry points for a training loop: `safe_backward`, `watch` and `create_gradient_manager`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Unpack

import torch
from torch import Tensor, nn

from gradtrack.config import GradientConfig, explicit
from gradtrack.errors import InputTypeError, UsageError
from gradtrack.manager import GradientManager
from gradtrack.reports import StepReport
from gradtrack.step.arguments import WatchSettings, as_sequence, check_hookable, check_model, hookable

_CLIPPING: Final = {"enable_gradient_clipping", "max_grad_norm", "norm_type", "clip_type", "adaptive_clipping"}
_ACTION: Final = {"nonfinite_action", "replace_nan_with", "replace_inf_with"}
_OF_MANAGER: Final = ("backends", "analyzers", "process_group")
"""The keywords that a manager takes beside the settings."""


def safe_backward(
    loss: Tensor,
    model: nn.Module,
    optimizer: Any,
    gradient_manager: GradientManager | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    accumulate: bool = False,
    epoch: int | None = None,
    batch: object = None,
    step: int | None = None,
    max_grad_norm: float | Mapping[str, float] | None = None,
) -> StepReport:
    """Run the backward pass and make its gradients safe to step with; call it in place of `loss.backward()`.

    `step` is the place of its row on the trackers' axis, where your own curves count other things than optimizer steps.
    `max_grad_norm` is the limit of this step alone, in the place of the setting: pass the same on every rank.
    Without a manager a model gets one of its own with the default configuration, which is kept until the program ends.
    """
    manager = gradient_manager if gradient_manager is not None else _default_manager(model, optimizer)
    if not isinstance(manager, GradientManager):
        raise InputTypeError(
            f"gradient_manager {type(manager).__name__}: expected a GradientManager. "
            "Make one before the loop, with GradientManager(config) for example."
        )
    return manager.step(
        model,
        optimizer,
        loss,
        True,
        scaler=scaler,
        accumulate=accumulate,
        epoch=epoch,
        batch=batch,
        step=step,
        max_grad_norm=max_grad_norm,
    )


_DEFAULT_MANAGERS: weakref.WeakKeyDictionary[nn.Module, GradientManager] = weakref.WeakKeyDictionary()


def _default_manager(model: nn.Module, optimizer: Any) -> GradientManager:
    check_model(model)
    if model not in _DEFAULT_MANAGERS:
        _DEFAULT_MANAGERS[model] = GradientManager()
    manager = _DEFAULT_MANAGERS[model]
    if not manager.knows(model, optimizer):
        manager.attach(model, optimizer)
    return manager


def create_gradient_manager(
    max_grad_norm: float | Mapping[str, float] = 1.0,
    enable_monitoring: bool = True,
    enable_nan_inf_check: bool = True,
    verbose: bool = False,
    **settings: Any,
) -> GradientManager:
    """Make a manager from the settings that most people change; any other setting of `GradientConfig` works as well."""
    return GradientManager(
        max_grad_norm=max_grad_norm,
        enable_gradient_monitoring=enable_monitoring,
        enable_nan_inf_check=enable_nan_inf_check,
        verbose_logging=verbose,
        **settings,
    )


def only_as_asked(config: GradientConfig) -> GradientConfig:
    """Return the configuration as it is where the user has asked gradtrack to clip, else one that does not clip.

    That one leaves non-finite gradients alone, unless an action on them or a replacement was chosen.
    """
    if config.enable_gradient_clipping and config.model_fields_set & _CLIPPING:
        return config
    changes: dict[str, Any] = {"enable_gradient_clipping": False}
    if config.enable_nan_inf_check and not config.model_fields_set & _ACTION:
        changes["nonfinite_action"] = "report"
    return GradientConfig(**{**explicit(config), **changes})


def watch(
    model: nn.Module,
    optimizer: Any,
    config: GradientConfig | Mapping[str, Any] | str | Path | None = None,
    **settings: Unpack[WatchSettings],
) -> GradientManager:
    """Measure and report before every step of an optimizer, with no other change to the training loop.

    The training stays as it is unless a setting asks for a change: one of clipping (`max_grad_norm`, `clip_type`) makes
    it clip, and skip steps with non-finite gradients; `nonfinite_action` alone makes it act on these only. With several
    optimizers that step together after one backward pass, gradients are measured before the first of them steps. Close
    the manager, or leave that to the exit of the interpreter. `step` is a function that returns the place of the coming
    row on the trackers' axis, where your own curves count something else than optimizer steps.
    """
    check_model(model)
    optimizers = tuple(map(hookable, as_sequence(optimizer)))
    if not optimizers:
        raise UsageError(f"optimizer {optimizer!r}: expected at least one. Pass those that the loop steps.")
    for one in optimizers:
        check_hookable(one)
    chosen: dict[str, Any] = {**settings}
    place = chosen.pop("step", None)
    if place is not None and not callable(place):
        raise InputTypeError(f"step {place!r}: expected a function that returns the step. Pass lambda: global_step.")
    of_manager = {name: chosen.pop(name) for name in _OF_MANAGER if name in chosen}
    manager = GradientManager(only_as_asked(GradientConfig.load(config, **chosen)), **of_manager)
    manager.attach(model, optimizers)
    manager.follow(model, optimizers, step=place)
    return manager
