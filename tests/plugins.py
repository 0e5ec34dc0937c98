"""Entry points that stand for installed packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from gradtrack import registry


def entry_points_of(**backends: str) -> Callable[..., list[EntryPoint]]:
    """Return what takes the place of `registry.entry_points`: the name of each backend and where its class is."""
    points = [EntryPoint(name, value, "gradtrack.backends") for name, value in backends.items()]
    return lambda group: points if group == "gradtrack.backends" else []


def install(monkeypatch: pytest.MonkeyPatch, **backends: str) -> None:
    """Make backends known by their names for the time of a test."""
    monkeypatch.setattr(registry, "entry_points", entry_points_of(**backends))
