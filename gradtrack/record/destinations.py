"""How the journal remembers where its rows were to go, so that a replay finds the way again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradtrack import registry
from gradtrack.backends.base import Backend
from gradtrack.config import GradientConfig
from gradtrack.redact import is_hidden, redact_values


def destinations(specs: list[Any], backends: Mapping[str, Backend]) -> list[dict[str, Any]]:
    """Return name and options of every backend that a replay can reach again, without secrets."""
    options = dict(filter(None, (registry.split_spec(spec, "backend") for spec in specs)))
    return [
        {"name": name, "options": {**plain_options(options.get(name, {})), **_address(backend)}}
        for name, backend in backends.items()
        if not backend.inline
    ]


def without_hidden(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the options whose secrets were taken out; the environment or the caller has them."""
    return {name: value for name, value in options.items() if not is_hidden(value)}


def moved_along(options: Mapping[str, Any], home: str, directory: Path) -> dict[str, Any]:
    """Return options whose paths inside of a run's directory are where that directory lies now."""
    now = os.path.abspath(directory)
    if not home or home == now:
        return dict(options)
    # What a replay has noted since the move is there already, which shows where the run was moved to a place within.
    there = rf"(?!{re.escape(now)}(?:/|$))"
    inside = re.compile(rf"(?<![^/:]){there}{re.escape(home)}(?=/|$)")
    return {
        name: inside.sub(lambda _: now, value) if isinstance(value, str) else value for name, value in options.items()
    }


def _address(backend: Backend) -> dict[str, Any]:
    try:
        return plain_options(backend.address())
    except Exception:  # a tracker that cannot tell yet; the offsets file has the address later
        return {}


def chosen(config: GradientConfig) -> dict[str, Any]:
    """Return which backends and analyzers were asked for, by name, with the options that can be written down."""
    kinds = (("backends", registry.backends), ("analyzers", registry.analyzers))
    return {
        kind: specs if isinstance(specs, str) else [_named(spec, known) for spec in specs]
        for kind, known in kinds
        if kind in config.model_fields_set and (specs := getattr(config, kind))
    }


def _named(spec: object, known: registry.Registry) -> str | dict[str, Any]:
    found = registry.split_spec(spec, "plugin")
    if found is None:
        return known.name_of(spec)
    name, options = found[0], plain_options(found[1])
    return {"name": name, **options} if options else name


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that can be written down, without their secrets."""
    found: dict[str, Any] = {}
    for name, value in redact_values(options).items():
        try:
            found[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):  # an object that only this process has
            continue
    return found
