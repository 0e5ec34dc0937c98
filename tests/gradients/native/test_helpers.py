"""Threads that help the calling one, on every system."""

from __future__ import annotations

import os
import runpy

import pytest

from gradtrack.gradients.native import threads


def test_systems_without_a_fork_have_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be registered for a fork, as on Windows, the module is there and its threads work."""
    monkeypatch.delattr(os, "register_at_fork", raising=False)
    found = runpy.run_path(threads.__file__)
    done: list[str] = []
    for _ in found["helpers"]().lend(lambda: done.append("work"), 2):
        pass
    assert done == ["work", "work"]
