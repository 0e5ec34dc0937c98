"""The last step of a pair, while its numbers are still on a device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gradtrack.late import LateStep
from gradtrack.measure.moments import Moments
from gradtrack.outcome import Outcome


class WaitingStep:
    """Holds a step until somebody reads its report or the next one comes, and calls `conclude` with its numbers then.

    Whoever comes first waits for the device; a report may be read in another thread than the one that trains.
    """

    def __init__(self, conclude: Callable[[Moments, Outcome], None]) -> None:
        self._conclude = conclude
        self.held: Outcome | None = None
        self._settling = threading.RLock()

    def hold(self, outcome: Outcome) -> None:
        """Keep a step whose numbers nobody needs yet."""
        outcome.report.defer_to(lambda: self._fields(outcome))
        self.held = outcome

    def take(self) -> Outcome | None:
        """Let go of the step, with its numbers; None where there is none, or where it can be read no more."""
        outcome, self.held = self.held, None
        if outcome is None or (outcome.pending is not None and not outcome.pending.readable):
            return None
        self._settle(outcome)
        return outcome

    def _fields(self, outcome: Outcome) -> dict[str, Any]:
        self._settle(outcome)
        return outcome.facts()

    def _settle(self, outcome: Outcome) -> None:
        """Wait for the numbers, unless somebody has done so."""
        with self._settling:
            if outcome.pending is not None:
                self._take_numbers(outcome.pending, outcome)
                outcome.pending = None

    def _take_numbers(self, late: LateStep, outcome: Outcome) -> None:
        facts = outcome.facts
        moments, facts.loss = late.read()
        facts.take(moments)
        facts.deviations = late.deviations
        facts.nan_inf, facts.clipping = late.nan_inf(moments), late.clipping(moments)
        facts.skipped = facts.nan_inf["action"] in ("skip", "scaler")
        self._conclude(moments, outcome)
