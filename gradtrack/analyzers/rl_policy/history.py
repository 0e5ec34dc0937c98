"""The recent past of a policy: whether its entropy falls, and whether that bought return."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Final

from gradtrack.analyzers.rl_policy.entropy import mann_kendall, theil_sen
from gradtrack.analyzers.rl_policy.report import Adequacy, Risk
from gradtrack.support.state import Stateful

FLOOR: Final = 0.1
_WINDOW: Final = 50
_RETURNS: Final = 512
_FIRST: Final = 16
_ENOUGH: Final = 8
_SIGNIFICANT: Final = 0.05
_SURE: Final = 1e-3
_UNCHANGED: Final = 32
"""So many equal returns count as one where none was different: an off-policy method updates often in one episode."""
_DRIVEN: Final = 0.01


class PolicyHistory(Stateful):
    """The last 50 levels of entropy, and returns: the first 16 and the last 512.

    A level is a normalised entropy between 0 and 1. A policy is `blind` that does nearly the same in every state.
    """

    kept_in_checkpoints = ("levels", "returns", "first", "num_returns", "num_changes", "highest", "blind")

    def __init__(self) -> None:
        self.levels: deque[float] = deque(maxlen=_WINDOW)
        self.returns: deque[float] = deque(maxlen=_RETURNS)
        self.first: list[float] = []
        self.num_returns = 0
        self.num_changes = 0
        """How often a return differed from the one before: each minibatch of a rollout may come with the same one."""
        self.highest = 0.0
        self.blind = False

    def add(self, level: float | None, episode_return: float | None = None) -> None:
        """Take in one observation; what is not finite is left out."""
        if level is not None and math.isfinite(level):
            self.levels.append(level)
            self.highest = max(self.highest, level)
        if episode_return is not None and math.isfinite(episode_return):
            self.num_returns += 1
            self.num_changes += bool(self.returns) and episode_return != self.returns[-1]
            self.returns.append(episode_return)
            if len(self.first) < _FIRST:
                self.first.append(episode_return)

    @property
    def slope(self) -> float | None:
        """Return the Theil-Sen slope of the level per observation, or None before there are eight."""
        return theil_sen(self.levels) if len(self.levels) >= _ENOUGH else None

    @property
    def falling_in(self) -> float:
        """Return after how many observations a level that falls significantly will be at its floor."""
        slope = self.slope
        if slope is None or slope >= 0 or mann_kendall(self.levels)[1] > _SIGNIFICANT:
            return math.inf
        return max(self.levels[-1] - FLOOR, 0.0) / -slope

    @property
    def rising(self) -> bool | None:
        """Tell whether recent returns rise significantly, or None without enough of them."""
        recent = list(self.returns)[-_WINDOW:]
        return _rises(recent, _SIGNIFICANT) if len(recent) >= _ENOUGH else None

    @property
    def solved(self) -> bool:
        """Tell whether returns improved significantly since the start and stay at 90 % of their best improvement."""
        if len(self.returns) < _ENOUGH:
            return False
        start, (recent, best) = self._start, self._recent_and_best
        series = [*self.first, *self.returns] if self.num_returns > len(self.returns) else list(self.returns)
        return _rises(series, _SIGNIFICANT) and recent > start and recent - start >= 0.9 * (best - start)

    @property
    def pays(self) -> bool | None:
        """Tell whether the policy earns more by what it does, so that little entropy is no fault; None if unknown.

        Returns that rise again, but only to where they began, are those of a policy that has lost something.
        """
        rising = self.rising
        if rising is None:
            return None
        return (rising and fmean(list(self.returns)[-_ENOUGH:]) > self._start) or self.solved

    @property
    def _start(self) -> float:
        return fmean(self.first[: max(min(len(self.first), self.num_returns // 4), 2)])

    @property
    def _recent_and_best(self) -> tuple[float, float]:
        """Return the mean over the last quarter of the returns, and the best mean over as many in a row."""
        values, width = list(self.returns), max(len(self.returns) // 4, 2)
        means = [fmean(values[at : at + width]) for at in range(len(values) - width + 1)]
        return means[-1], max(means)

    def risk(self, level: float | None, *, informed: bool = False) -> Risk | None:
        """Judge the risk of collapse; an `informed` policy has lost its entropy by acting differently by state."""
        if level is None or not math.isfinite(level):
            return None
        if self.pays:
            return "LOW"
        may_be_sure = informed and self.pays is None
        if level < FLOOR:
            if self.came_sure:
                return "LOW"
            return "MEDIUM" if may_be_sure else "HIGH"
        if may_be_sure:
            return "LOW"
        falling_in = self.falling_in
        if falling_in < _WINDOW / 2:
            return "HIGH"
        return "MEDIUM" if falling_in < 2 * _WINDOW else "LOW"

    def adequacy(self, level: float | None, least: float) -> Adequacy | None:
        """Judge exploration against a least level; too much of it needs returns that stagnate after a warm-up."""
        if level is None or not math.isfinite(level):
            return None
        if level < least and not self.pays and not self.came_sure:
            return "TOO_LOW"
        stagnant = self.pays is False and (
            self._saw_returns(_WINDOW) or (self.driven_up and self._saw_returns(_ENOUGH))
        )
        return "TOO_HIGH" if level > 0.95 and stagnant else "ADEQUATE"

    def _saw_returns(self, count: int) -> bool:
        """Tell whether there were so many returns; equal ones may be one episode, unless there are very many."""
        return self.num_changes + 1 >= count or (not self.num_changes and self.num_returns >= _UNCHANGED * count)

    @property
    def came_sure(self) -> bool:
        """Tell whether a level this low was there from the first, while returns stay at their best.

        A policy that comes trained is as sure of itself as one that has collapsed, but it has lost nothing, and what it
        is sure of depends on the state.
        """
        if self.blind or len(self.levels) < _ENOUGH or self.highest >= 2 * FLOOR or len(self.returns) < _ENOUGH:
            return False
        recent, best = self._recent_and_best
        return recent >= best - 0.1 * abs(best)

    @property
    def driven_up(self) -> bool:
        """Tell whether the level has been rising significantly, so that something makes the policy more random."""
        enough = len(self.levels) >= _FIRST and self.levels[-1] - self.levels[0] > _DRIVEN
        return enough and _rises(self.levels, _SURE)


def _rises(values: Sequence[float], significance: float) -> bool:
    total, chance = mann_kendall(values)
    return total > 0 and chance <= significance
