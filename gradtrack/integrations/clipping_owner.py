"""Decides who clips, the framework or gradtrack, and joins the trackers that the framework has open."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradtrack import registry
from gradtrack.config import GradientConfig, explicit
from gradtrack.loop import only_as_asked
from gradtrack.step.unused_settings import CLIPPING, changed_settings
from gradtrack.support.interrupts import process_rank

_logger = logging.getLogger("gradtrack")
Source = GradientConfig | Mapping[str, Any] | str | Path | None


def clipping_if_asked(config: GradientConfig, *, clips: str) -> GradientConfig:
    """Return the configuration; it only measures unless the user has asked for clipping and the framework does none.

    Where the framework clips, `clips` says so for the settings of our own clipping, which have no effect then.
    """
    if not clips:
        return only_as_asked(config)
    values, changed = explicit(config), changed_settings(config)
    for name in CLIPPING if process_rank() == 0 else ():
        if name in changed:
            _logger.warning("%s=%r has no effect: %s", name, values[name], clips)
    values = {name: value for name, value in values.items() if name not in CLIPPING}
    return only_as_asked(GradientConfig(**{**values, "enable_gradient_clipping": False}))


def joined(
    config: GradientConfig, defaults: Sequence[str], join: Callable[[str], Mapping[str, Any] | None]
) -> GradientConfig:
    """Return the configuration with its backends in the framework's own runs.

    Without any backends in it, `defaults` are taken. `join` gives the options that lead a backend, which is named
    without options, into the framework's run.
    """
    specs: list[Any] = list(config.backends) if "backends" in config.model_fields_set else list(defaults)
    found = []
    for spec in specs:
        named = registry.split_spec(spec, "backend")
        options = join(named[0]) if named is not None and not named[1] else None
        found.append(spec if named is None or not options else {"name": named[0], **options})
    return GradientConfig.load(config, backends=found)
