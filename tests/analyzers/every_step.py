"""Every analyzer there is, looking at every step."""

from __future__ import annotations

from typing import Final

import pytest

from gradtrack import registry
from gradtrack.analyzers import flow
from gradtrack.analyzers.base import always

NAMES: Final = tuple(registry.analyzers.builtin())


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every analyzer look at every step."""
    for name in NAMES:
        monkeypatch.setattr(registry.analyzers.load(name), "schedule", staticmethod(always))
    monkeypatch.setattr(flow, "often", always)
