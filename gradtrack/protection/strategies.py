"""Clipping strategies: the limit of the norm, fixed, by group, or computed from the norms of the steps before."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradtrack import registry
from gradtrack.config import GradientConfig
from gradtrack.errors import UsageError
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.parameters import NamedParameter, ParameterTable
from gradtrack.support.state import Stateful

WARMUP: Final = 10
"""How many norms must be known before a strategy judges by them; `max_grad_norm` applies until then."""

ClippedNorm = tuple[float, float]
"""The norm of a step before and after clipping."""


class Memory(NamedTuple):
    """The settings of a step that say how long its norm is remembered."""

    window_size: int
    alpha: float

    @classmethod
    def of(cls, config: GradientConfig) -> Memory:
        """Return the settings of a configuration as they are now."""
        return cls(config.adaptive_window_size, config.zscore_alpha)


class Strategy(Stateful, ABC):
    """A clipping strategy: computes the limit of the next step's norm from finite norms."""

    kept_in_checkpoints: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def threshold(self, config: GradientConfig) -> float:
        """Return the limit of the norm for the current step."""

    def observe(self, norms: Sequence[ClippedNorm], memory: Memory) -> None:
        """Remember the finite norms of steps before and after clipping."""


class FixedStrategy(Strategy):
    """The limit `max_grad_norm` of the configuration."""

    def threshold(self, config: GradientConfig) -> float:
        return float(config.max_grad_norm)


class AdaptiveStrategy(Strategy):
    """A percentile of the recent norms before clipping, as `numpy.percentile` has it, without the current one.

    The norms are kept sorted from the first time on that the clipper asks for the percentile.
    """

    kept_in_checkpoints = ("_recent", "_seen")

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] | None = None
        self._seen = 0

    def threshold(self, config: GradientConfig) -> float:
        if self._seen < WARMUP:
            return float(config.max_grad_norm)
        if len(self._recent) > config.adaptive_window_size:
            self._change((), config.adaptive_window_size)
        if self._sorted is None:
            self._sorted = sorted(self._recent)
        return percentile(self._sorted, config.adaptive_percentile) or float(config.max_grad_norm)

    def observe(self, norms: Sequence[ClippedNorm], memory: Memory) -> None:
        self._change([norm for norm, _ in norms], memory.window_size)
        self._seen += len(norms)

    def _change(self, added: Sequence[float], size: int) -> None:
        """Add norms and drop the oldest beyond a size."""
        ordered, recent = self._sorted, self._recent
        self._sorted = None  # an exception within leaves the norms to be sorted anew
        recent.extend(added)
        oldest = [recent.popleft() for _ in range(len(recent) - size)]
        if ordered is not None:
            for norm in added:
                insort(ordered, norm)
            for norm in oldest:
                del ordered[bisect_left(ordered, norm)]
            self._sorted = ordered

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._sorted = None


class ZScoreStrategy(Strategy):
    """A number of standard deviations above the running mean of the norms, in which spikes count as clipped.

    Mean and variance are exponential moving averages (arXiv 2504.02507 has the idea for pre-training spikes).
    """

    kept_in_checkpoints = ("_mean", "_variance", "_seen")

    def __init__(self) -> None:
        self._mean = 0.0
        self._variance = 0.0
        self._seen = 0

    def threshold(self, config: GradientConfig) -> float:
        if self._seen < WARMUP:
            return float(config.max_grad_norm)
        return self._mean + config.zscore_threshold * math.sqrt(self._variance) or float(config.max_grad_norm)

    def observe(self, norms: Sequence[ClippedNorm], memory: Memory) -> None:
        mean, variance, seen, least = self._mean, self._variance, self._seen, 1.0 - memory.alpha
        for norm, clipped_norm in norms:
            value, seen = norm if seen < WARMUP else clipped_norm, seen + 1
            # While few norms are known the weight of each is 1/n, so that the first one does not own the average.
            weight = max(least, 1.0 / seen)
            change = value - mean
            mean, variance = mean + weight * change, (1.0 - weight) * (variance + weight * change * change)
        self._mean, self._variance, self._seen = mean, variance, seen  # together, whatever interrupts


def members(key: str, params: Sequence[NamedParameter]) -> list[int]:
    """Return the positions of the parameters that a key means.

    It is the name of an optimizer's group, else that of a group in reports, else a regular expression that is found in
    a name, as in the setting `groups`.
    """
    for kind in ("label", "group"):
        found = [index for index, param in enumerate(params) if getattr(param, kind) == key]
        if found:
            return found
    return [index for index, param in enumerate(params) if any(re.search(key, name) for name in param.names)]


def assign_limits(limits: Iterable[str], params: Sequence[NamedParameter]) -> list[int]:
    """Return for each parameter the position of the first key that means it, or -1."""
    found = [-1] * len(params)
    for position, key in enumerate(limits):
        for index in members(key, params):
            if found[index] < 0:
                found[index] = position
    return found


EVERYTHING: Final = ".*"
"""The pattern for the parameters that no key before it means, of which there may be none."""


def check_limits(limits: Iterable[str], params: Sequence[NamedParameter]) -> None:
    """Refuse a key that means none of these parameters, and one whose parameters all belong to keys before it."""
    keys = list(limits)
    taken = assign_limits(keys, params)
    for position, key in enumerate(keys):
        if position in taken or key == EVERYTHING:
            continue
        found = members(key, params)
        if found:
            raise UsageError(
                f"max_grad_norm of {key!r} limits nothing: expected parameters that no key before it has, and "
                f"{keys[taken[found[0]]]!r} has them. Write {key!r} first."
            )
        known = dict.fromkeys(name for param in params for name in (param.label, param.group, *param.names) if name)
        raise UsageError(
            f"max_grad_norm of {key!r} limits nothing: expected the name of an optimizer's group, of a group in "
            f"report.groups, or a regular expression that is found in a parameter's name."
            f"{registry.nearest(key, list(known)) or f' There are {_some(known)}.'}"
        )


class GroupLimits:
    """Finds the gradients that each key of limits by group is for, anew where keys, parameters or optimizers change."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._checked: list[str] = []
        self._table: ParameterTable | None = None
        self._position: dict[str, int] = {}
        self._sets: tuple[Layout | None, NDArray[np.int64]] = None, np.zeros(0, np.int64)

    def find(
        self,
        limits: Mapping[str, float],
        table: ParameterTable,
        labels: Callable[[], Mapping[int, str]] = dict,
        others: Callable[[], Sequence[NamedParameter]] = tuple,
    ) -> None:
        """Find the parameters of a table that each key means; refuse one that means none, here or among `others`.

        `labels` returns the names of the optimizers' groups by the ids of parameters.
        """
        keys = list(limits)
        if keys == self._keys and table is self._table:
            return
        named, frozen = table.named(labels())
        if keys != self._checked:  # what is frozen later on does not end the training
            check_limits(keys, [*named, *frozen, *others()])
        self._table = None  # until all of it is known
        self._position = dict(zip(table.names, assign_limits(keys, named), strict=True))
        self._sets = None, self._sets[1]
        self._checked, self._keys, self._table = keys, keys, table

    def forget(self) -> None:
        """Find them anew at the next step, since the groups of the optimizers have changed."""
        self._table = None

    def sets(self, layout: Layout) -> NDArray[np.int64]:
        """Return for each gradient the position of its key, or -1."""
        if self._sets[0] is not layout:
            found = [self._position[name] for name in layout.names]
            self._sets = layout, np.array(found, dtype=np.int64)
        return self._sets[1]


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(map(repr, shown[:_SHOWN])) + (", ..." if len(shown) > _SHOWN else "")


_SHOWN: Final = 6


def percentile(ordered: list[float], percent: float) -> float:
    """Return a percentile of ascending values, bit for bit as `numpy.percentile` interpolates it."""
    position = percent / 100.0 * (len(ordered) - 1)
    index = min(int(position), len(ordered) - 1)
    low, high = ordered[index], ordered[min(index + 1, len(ordered) - 1)]
    share, gap = position - index, high - low
    return low + gap * share if share < 0.5 else high - gap * (1.0 - share)


def coefficient_of(norm: float, limit: float, epsilon: float) -> float:
    """Return the factor that clipping to a limit multiplies gradients by: at most 1, as torch computes it."""
    coefficient = limit / (norm + epsilon) if norm + epsilon > 0 else 1.0
    return coefficient if coefficient < 1.0 else 1.0


def coefficient_for(norm: float, threshold: float, epsilon: float) -> dict[str, Any]:
    """Return the report fields of clipping a norm to a threshold, as `torch.nn.utils.clip_grad_norm_` scales it."""
    coefficient = coefficient_of(norm, threshold, epsilon)
    if coefficient >= 1.0:
        return {"clipped": False, "threshold": threshold, "coefficient": 1.0, "norm_after": norm}
    return {"clipped": True, "threshold": threshold, "coefficient": coefficient, "norm_after": norm * coefficient}


def clipping_fields(
    clip_type: str, limit: float | None, epsilon: float, norm: float, clip_rate: float
) -> dict[str, Any]:
    """Return the fields of a `ClippingReport` for a finite norm; without a limit clipping is off."""
    if limit is None:
        return {"enabled": False, "clip_type": clip_type, "norm_before": norm, "norm_after": norm}
    found = coefficient_for(norm, limit, epsilon)
    found["clip_type"], found["norm_before"], found["clip_rate"] = clip_type, norm, clip_rate
    return found
