"""Usual steps that wait to be taken in, and what their reports are made of."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradtrack.facts import StepFacts
from gradtrack.measure.layout import Layout
from gradtrack.protect.clipping import clipping_fields
from gradtrack.reports import HEALTHY

Entry = tuple[float | None, float, float, float, Any]
"""What is known of a step beside its sums: loss, norm, ln of the norm, clip rate and learning rates."""


class Common(NamedTuple):
    """What usual steps have in common for as long as nothing changes."""

    layout: Layout
    aliases: dict[str, list[str]]
    with_groups: bool
    with_parameters: bool
    clip_type: str
    limit: float | None
    epsilon: float
    nan_inf: dict[str, Any]

    def clipping(self, norm: float, clip_rate: float) -> dict[str, Any]:
        """Return the fields of a `ClippingReport`."""
        return clipping_fields(self.clip_type, self.limit, self.epsilon, norm, clip_rate)


class Stretch:
    """Steps that wait to be taken in; their reports can be read before, and keep neither model nor gradients alive."""

    __slots__ = ("_facts", "_first", "_lock", "_results", "_shared", "common", "entries")

    def __init__(self, common: Common, results: NDArray[np.float64]) -> None:
        self.common, self.entries = common, list[Entry]()
        self._results, self._shared = results, True
        self._first = len(common.layout.names)
        """The row of the first group; what comes before belongs to the parameters."""
        self._facts: dict[int, StepFacts] = {}
        self._lock = threading.RLock()  # another thread may read a report, and a handler of a signal

    def leave(self) -> None:
        """Let the memory of the results be used for the next steps."""
        with self._lock:
            self._results, self._shared = self._results[: len(self.entries)].copy(), False

    def shrink(self) -> None:
        """Forget the rows of the single parameters, unless the reports are to show them."""
        with self._lock:
            for facts in self._facts.values():
                facts.shrink()
            if not self.common.with_parameters:
                self._results, self._first = self._results[:, self._first :].copy(), 0

    def fields(self, slot: int) -> dict[str, Any]:
        """Return the fields of the report of a step."""
        return self.facts(slot)()

    def facts(self, slot: int) -> StepFacts:
        """Return what is known of a step."""
        with self._lock:
            facts = self._facts.get(slot)
            if facts is None:
                facts = self._facts[slot] = self._make(slot)
            return facts

    def _make(self, slot: int) -> StepFacts:
        common, results, first = self.common, self._results[slot], self._first
        loss, norm, _, clip_rate, rates = self.entries[slot]
        facts = StepFacts(common.layout, {})
        facts.aliases = common.aliases
        facts.with_groups, facts.with_parameters = common.with_groups, common.with_parameters
        if self._shared:
            results = results.copy()
        if first:
            facts.rows = results[:first]
        facts.group_rows, facts.total = results[first:-1], results[-1].tolist()
        facts.loss, facts.lr = loss, rates
        facts.nan_inf, facts.clipping, facts.health = common.nan_inf, common.clipping(norm, clip_rate), HEALTHY
        return facts
