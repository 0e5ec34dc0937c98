"""All scenarios, listed once."""

from __future__ import annotations

from benchmarks.diagnosis import faults, fresh, healthy, special
from benchmarks.diagnosis.blind import adapted, book, broken, broken_dynamics, odd, supervised
from benchmarks.diagnosis.run import SCENARIOS, Scenario

BLIND = (adapted, broken, broken_dynamics, odd, supervised)
"""Modules that list their runs when they are imported."""


def load() -> dict[str, Scenario]:
    """Return every scenario by its name."""
    if not SCENARIOS:
        healthy.declare()
        special.declare()
        faults.declare()
        fresh.declare()
        book.declare()
    return SCENARIOS
