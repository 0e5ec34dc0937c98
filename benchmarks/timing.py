"""Interleaved timing: every candidate in every round, so that the noise of a shared machine meets all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Action = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One ratio, with the bar that it should stay under, where there is one."""

    benchmark: str
    case: str
    what: str
    ratio: float
    bar: float | None = None
    unit: str = "x"
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the ratio is within its bar; None where there is no bar."""
        return None if self.bar is None else self.ratio <= self.bar


def once(action: Action) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def interleaved(
    candidates: Mapping[str, Action], *, rounds: int, before: Action = lambda: None, warm: int = 3
) -> dict[str, float]:
    """Return the median seconds of each candidate; `before` runs untimed ahead of every call."""
    found = all_times(candidates, rounds=rounds, before=before, warm=warm)
    return {name: statistics.median(times) for name, times in found.items()}


def usual_mean(times: Sequence[float]) -> float:
    """Return the mean of all but the slowest fiftieth, in which the machine did something else.

    Unlike a median it has its share of what a candidate does on every sixteenth call only.
    """
    return statistics.fmean(sorted(times)[: len(times) - len(times) // 50])


def all_times(
    candidates: Mapping[str, Action], *, rounds: int, before: Action = lambda: None, warm: int = 3
) -> dict[str, list[float]]:
    """Return the seconds of every call of each candidate, taken in turns."""
    for _ in range(warm):
        for action in candidates.values():
            before()
            action()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before()
            times[name].append(once(candidates[name]))
    return times
