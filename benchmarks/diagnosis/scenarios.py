"""All scenarios, listed once."""

from __future__ import annotations

from benchmarks.diagnosis import faults, fresh, healthy, special
from benchmarks.diagnosis.blind import adapted, book, broken, broken_dynamics, odd, supervised
from benchmarks.diagnosis.corner import agents as corner_agents
from benchmarks.diagnosis.corner import broken_depth, broken_kinds, broken_steps, odds, pictures, plain
from benchmarks.diagnosis.corner import series as corner_series
from benchmarks.diagnosis.foreign import (
    a_adapted,
    a_generative,
    a_layers,
    a_pictures,
    a_rates,
    a_starved,
    a_tables,
    a_wiring,
    b_agents,
    b_broken_fields,
    b_broken_sequences,
    b_fields,
    b_sequences,
    b_tables,
    b_transformers,
)
from benchmarks.diagnosis.run import SCENARIOS, Scenario
from benchmarks.diagnosis.unseen import agents, series, tables, vision
from benchmarks.diagnosis.unseen import broken as unseen_broken

LATER = (adapted, broken, broken_dynamics, odd, supervised, agents, series, tables, unseen_broken, vision)
"""Modules that list their runs when they are imported."""

FOREIGN = (a_adapted, a_generative, a_layers, a_pictures, a_rates, a_starved, a_tables, a_wiring)
FOREIGN += (b_agents, b_broken_fields, b_broken_sequences, b_fields, b_sequences, b_tables, b_transformers)
"""Modules of authors who have not seen the rules, which list their runs in the same way."""

CORNER = (broken_depth, broken_kinds, broken_steps, corner_agents, corner_series, odds, pictures, plain)
"""Modules of the runs in corners, which list their runs in the same way."""


def load() -> dict[str, Scenario]:
    """Return every scenario by its name."""
    if not SCENARIOS:
        healthy.declare()
        special.declare()
        faults.declare()
        fresh.declare()
        book.declare()
    return SCENARIOS
