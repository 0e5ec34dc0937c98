"""What an analyzer says of itself: how it computes, after whom, at what cost, and an example that runs."""

from __future__ import annotations

import doctest
import importlib
import re

import pytest

from gradtrack import registry
from gradtrack.analyzers.gain import monitor
from tests.analyzers.every_step import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_analyzer_states_formula_reference_and_cost(name: str) -> None:
    """The docstring has a formula, names who found it, says what it costs, and works an example."""
    text = registry.analyzers.load(name).__doc__ or ""
    assert re.search(r"[‖/|=]", text)
    assert re.search(r"References?:|et al\.", text)
    assert "Cost:" in text
    assert ">>>" in text


@pytest.mark.parametrize("name", NAMES)
def test_the_worked_example_runs(name: str) -> None:
    """The example of the analyzer prints what it says."""
    failed, attempted = doctest.testmod(importlib.import_module(f"gradtrack.analyzers.{name}"))
    assert (failed, attempted > 0) == (0, True)


def test_the_example_of_the_gain_monitor_runs() -> None:
    """The example of the monitor prints what it says."""
    failed, attempted = doctest.testmod(monitor)
    assert (failed, attempted > 0) == (0, True)
