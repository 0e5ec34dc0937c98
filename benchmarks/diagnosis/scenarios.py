"""All scenarios, listed once."""

from __future__ import annotations

from benchmarks.diagnosis import faults, fresh, healthy, special
from benchmarks.diagnosis.run import SCENARIOS, Scenario


def load() -> dict[str, Scenario]:
    """Return every scenario by its name."""
    if not SCENARIOS:
        healthy.declare()
        special.declare()
        faults.declare()
        fresh.declare()
    return SCENARIOS
