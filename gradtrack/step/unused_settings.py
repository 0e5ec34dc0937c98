"""Unused settings: warns about settings and calls without effect, and about names that match no layer or parameter."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import nn

from gradtrack import registry
from gradtrack.analyzers.tools.optimizer_hooks import uncompiled
from gradtrack.config import PREFIX, GradientConfig, explicit
from gradtrack.gradients.distributed.shards import unwrapped
from gradtrack.reports import IssueType
from gradtrack.step.arguments import hookable
from gradtrack.support.interrupts import Changes
from gradtrack.support.rank import process_rank

_LIMITS: Final = ("max_grad_norm", "clip_type", "adaptive_clipping")
_ADAPTIVE: Final = ("adaptive_window_size", "adaptive_percentile")
_AGC: Final = ("agc_clip_factor",)
_ZSCORE: Final = ("zscore_threshold", "zscore_alpha")
CLIPPING: Final = (*_LIMITS, "norm_type", *_ADAPTIVE, *_AGC, *_ZSCORE)
"""The settings that say how gradtrack clips, which have no effect while clipping is off."""
_REPLACING: Final = ("replace_nan_with", "replace_inf_with")
_SPIKES: Final = ("spike_threshold", "spike_window", "spike_robust", "spike_max_in_a_row", "spike_lr_factor")
_CAPTURE: Final = ("capture_max_steps", "capture_max_bytes", "capture_optimizer")
_MONITORED: Final = ("vanishing_threshold", "exploding_threshold", "log_histograms", "track_parameters", "groups")
# By then all pairs of a game are attached, since a second pair without a name is an error.
_ALL_ARE_HERE: Final = 2
_MOST_UNMEASURED: Final = 8
_logger = logging.getLogger("gradtrack")


class UnusedSettings:
    """Warns once about each setting of a configuration that has no effect.

    A setting with its default value is not mentioned, so a configuration may list all of them.
    """

    def __init__(self, config: GradientConfig) -> None:
        self._config = config
        self._num_steps = 0
        self.waits = process_rank() == 0 and bool(config.mute or config.groups)
        """Whether the names in `mute` and `groups` have yet to be checked against the models."""
        for name in sorted(os.environ) if process_rank() == 0 else ():
            if name.startswith(PREFIX) and name.removeprefix(PREFIX).lower() not in GradientConfig.model_fields:
                close = registry.nearest(
                    name, [f"{PREFIX}{field.upper()}" for field in GradientConfig.model_fields], cutoff=0.9
                )
                if close:
                    _logger.warning("the environment's %s has no effect: it is no setting.%s", name, close)
        for setting, reason in switched_off(config) if process_rank() == 0 else ():
            _logger.warning("%s has no effect: %s", setting, reason)

    def step(self, models: Mapping[str, nn.Module]) -> None:
        """Check the names after the second step, by which every pair of a game is attached."""
        self._num_steps += 1
        if self._num_steps == _ALL_ARE_HERE:
            self.waits = False
            self._check_names(models)

    def _check_names(self, models: Mapping[str, nn.Module]) -> None:
        config = self._config
        layers, params = _names(models.values())
        for group, pattern in config.groups.items():
            if not any(re.search(pattern, name) for name in params):
                close = registry.nearest(pattern, params)
                _logger.warning("group %r is empty: %r is found in the name of no parameter.%s", group, pattern, close)
        known = ["", *layers, *params, *config.groups, *models]  # an issue of the whole run has no layer
        for entry in config.mute:
            pattern = _layer(entry)
            if pattern and not any(re.search(pattern, name) for name in known):
                types = [kind.value for kind in IssueType]
                close = registry.nearest(entry.upper(), types, cutoff=0.75) or registry.nearest(pattern, layers)
                _logger.warning("mute %r silences nothing: it is no type of issue and no layer.%s", entry, close)


class UnmeasuredSteps:
    """Warns once where an optimizer steps again and again while every call of the loop says `accumulate=True`.

    Hooks count the steps between the first such call of a pair and its first measured step: a loop that measures pays
    for one step.
    """

    def __init__(self) -> None:
        self._changes = Changes()
        self._steps: Counter[int] = Counter()
        self._step_count: int | None = None
        self._is_over = False

    def expect(self, optimizers: Sequence[Any], step_count: int) -> None:
        """Take note of a micro-batch; `step_count` is the number of measured steps so far."""
        if self._is_over:
            return
        if self._step_count is None:
            self._step_count = step_count
            for one in map(hookable, optimizers):
                if hasattr(one, "_optimizer_step_post_hooks"):
                    self._changes.hook(one.register_step_post_hook, uncompiled(self._count))
        elif step_count != self._step_count:
            self.close()
        elif max(self._steps.values(), default=0) >= _MOST_UNMEASURED:
            self.close()
            if process_rank() == 0:
                _logger.warning(
                    "the optimizer has stepped %d times, and none of these steps was measured, clipped or recorded: "
                    "every call had accumulate=True. Leave it out at the last micro-batch of each step, as in "
                    "accumulate=(index + 1) %% 4 != 0.",
                    max(self._steps.values()),
                )

    def close(self) -> None:
        """Remove the hooks; a second call does nothing."""
        self._is_over = True
        self._changes.undo()

    def _count(self, optimizer: Any, *_: object) -> None:
        self._steps[id(optimizer)] += 1


def switched_off(config: GradientConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting that was changed and has no effect, as it is written, with the reason."""
    kind = config.effective_clip_type
    others = {"adaptive": _ADAPTIVE, "agc": _AGC, "zscore": _ZSCORE}
    reasons: list[tuple[bool, Iterable[str], str]] = [
        (not config.enable_gradient_clipping, CLIPPING, "enable_gradient_clipping is off"),
        (config.adaptive_clipping and config.clip_type != "adaptive", ("clip_type",), "adaptive_clipping wins over it"),
        (kind == "agc", ("max_grad_norm",), "clip_type agc limits each unit by agc_clip_factor"),
        (kind != "norm", ("norm_type",), f"the gradients are clipped by {kind}"),
        *((kind != one, names, f"the gradients are clipped by {kind}") for one, names in others.items()),
        (not config.enable_nan_inf_check, ("nonfinite_action", *_REPLACING), "enable_nan_inf_check is off"),
        (config.nonfinite_action != "replace", _REPLACING, f"nonfinite_action is {config.nonfinite_action}"),
        (config.spike_action == "report", _SPIKES, "spike_action is report, which leaves spikes as they are"),
        (config.spike_action != "rollback", ("spike_lr_factor",), f"spike_action is {config.spike_action}"),
        (config.capture == "off", _CAPTURE, "capture is off"),
        (not config.fingerprints, ("fingerprints_max_bytes",), "fingerprints is off"),
        (not config.enable_gradient_monitoring, _MONITORED, "enable_gradient_monitoring is off"),
        (not config.grad_track_per_weight_matrix, ("groups",), "grad_track_per_weight_matrix is off"),
    ]
    changed = changed_settings(config)
    for applies, names, reason in reasons:
        for name in names if applies else ():
            if name in changed:
                yield f"{name}={changed.pop(name)!r}", reason


def changed_settings(config: GradientConfig) -> dict[str, Any]:
    """Return the settings that were set to another value than their default."""
    fields = type(config).model_fields
    return {
        name: value
        for name, value in explicit(config).items()
        if value != fields[name].get_default(call_default_factory=True)
    }


def _names(models: Iterable[nn.Module]) -> tuple[list[str], list[str]]:
    """Return the names of layers, as issues have them, and of parameters."""
    layers, params = [], []
    for model in map(unwrapped, models):
        for name, module in model.named_modules():
            layers.append(name)
            if isinstance(module, nn.RNNBase):
                levels = [f"l{level}{way}" for level in range(module.num_layers) for way in ("", "_reverse")]
                layers += [f"{name}.{level}" if name else level for level in levels]
        params += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [name for name in layers if name], params


def _layer(entry: str) -> str:
    """Return the part of an entry that stands for layers; none where a type is muted everywhere."""
    kind, _, layer = entry.partition(":")
    return layer if kind.upper() in IssueType.__members__ else entry
