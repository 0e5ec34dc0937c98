"""Gradient clipping: decides from the measured norm, and scales the gradients only if the norm is above its limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
from torch import Tensor, nn

from gradtrack.config import ClipType, GradientConfig
from gradtrack.errors import UsageError
from gradtrack.gradients.collected import ClippingForecast, Gradients, SharedGradients
from gradtrack.gradients.distributed.merge import Ranks
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.moments import MAX, MIN, SQUARES, Moments, finite_norm
from gradtrack.gradients.parameters import ParameterTable
from gradtrack.gradients.torch_device import Orders
from gradtrack.protection.agc import CutUnits, limit_units, num_units
from gradtrack.protection.nonfinite import rounded
from gradtrack.protection.strategies import (
    EVERYTHING,
    AdaptiveStrategy,
    ClippedNorm,
    FixedStrategy,
    GroupLimits,
    Memory,
    Strategy,
    ZScoreStrategy,
    coefficient_for,
)
from gradtrack.reports import ClippingReport

_RATE_WINDOW: Final = 100
_RATE_BITS: Final = (1 << _RATE_WINDOW) - 1
_TORCH_EPSILON: Final = 1e-6
_ELEMENTWISE: Final = frozenset({"value", "agc"})


class GradientClipper:
    """Clips the gradients of a model by the strategy of its configuration, and remembers what that strategy needs.

    `norm`, `adaptive` and `zscore` scale all gradients by one factor `min(1, limit / (norm + 1e-6))`, as
    `torch.nn.utils.clip_grad_norm_` does. `value` clamps each element and `agc` limits the gradient of each unit (row)
    to a multiple of its weights' norm (Brock et al. 2021); their coefficient is the norm after over the norm before.
    """

    def __init__(self, config: GradientConfig | None = None, *, measurer: Measurer | None = None) -> None:
        self.config = config if config is not None else GradientConfig()
        self.measurer = measurer if measurer is not None else Measurer(self.config.engine)
        self._strategies: dict[ClipType, Strategy] = {
            "norm": FixedStrategy(),
            "adaptive": AdaptiveStrategy(),
            "zscore": ZScoreStrategy(),
        }
        self._engaged = (0, 0)
        """The window of the clip rate: its number of steps, at most a hundred, and a bit for each, set if clipped."""
        self._cut: tuple[Ranks, ClipType, CutUnits] | None = None
        self.limit_of_step: Any = None
        self.group_limits = GroupLimits()

    @property
    def clip_rate(self) -> float:
        """Return the share of the last hundred steps in which clipping engaged."""
        num_steps, bits = self._engaged
        return bits.bit_count() / num_steps if num_steps else 0.0

    def clip_gradients(self, model: nn.Module) -> ClippingReport:
        """Measure and clip the gradients that a model has now."""
        table = ParameterTable(model, self.config.groups)
        grads = table.gradients()
        if self.limits_groups:
            self.group_limits.find(self.limits, table)
        if isinstance(grads, SharedGradients) and self.is_elementwise:
            moments = grads.measure(self.measurer, limited=partial(self.foresee, replace=None))
        else:
            moments = grads.measure(self.measurer)
        return ClippingReport(**self.clip(grads, moments))

    def clip(self, grads: Gradients, moments: Moments, *, remember: bool = True) -> dict[str, Any]:
        """Clip gradients that were measured, and return the fields of a `ClippingReport`."""
        config, norm = self.config, moments.norm
        clip_type = config.effective_clip_type
        if not (config.enable_gradient_clipping and math.isfinite(norm)):
            return self.left_alone(norm)
        if clip_type in _ELEMENTWISE:
            found = self._clip_elements(grads, moments, norm)
        elif self.limits_groups:
            found = self._clip_groups(grads, moments, norm)
        else:
            found = coefficient_for(norm, self.limit(), self.epsilon)
            if found["clipped"]:
                grads.scale(self.measurer, found["coefficient"])
        return self._describe(norm, found, remember=remember)

    def orders(self, grads: Gradients, **others: Any) -> Orders:
        """Return what a device needs to clip gradients by itself, with `others`; no limit where nothing is clipped."""
        clip_type = self.config.effective_clip_type
        if not self.config.enable_gradient_clipping:
            return Orders(**others)
        if clip_type not in _ELEMENTWISE:
            return Orders(self.limit(), self.epsilon, **others)
        limit, num_limitable = self._elementwise_limit(grads)
        limits = {dtype: rounded(limit, dtype) for dtype in {grad.dtype for grad in grads.tensors}}
        return Orders(limit, clip_type=clip_type, limits=limits, num_limitable=num_limitable, **others)

    def clipped(self, norm: float, orders: Orders, num_limited: float, squares_after: float) -> dict[str, Any]:
        """Return the fields of a `ClippingReport` for gradients that a device has clipped, and remember their norm."""
        if orders.limit is None or not math.isfinite(norm):
            return self.left_alone(norm)
        if orders.clip_type == "norm":
            return self._describe(norm, coefficient_for(norm, orders.limit, orders.epsilon))
        after = math.sqrt(squares_after) if num_limited else norm
        return self._describe(norm, _elementwise(norm, after, orders.limit, num_limited, orders.num_limitable))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later steps depend on, as plain data."""
        strategies = {name: strategy.state_dict() for name, strategy in self._strategies.items()}
        num_steps, bits = self._engaged
        engaged = [bool(bits >> age & 1) for age in reversed(range(num_steps))]  # the oldest step first
        return {"strategies": strategies, "engaged": engaged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, strategy in self._strategies.items():
            strategy.load_state_dict(state["strategies"][name])
        self._engaged = (0, 0)
        for clipped in state["engaged"]:
            self.engage(clipped)

    def clip_spike(self, grads: Gradients, moments: Moments, target: float) -> dict[str, Any]:
        """Clip as ever, then down to the norm `target`, and return the fields of the report.

        The step counts in the clip rate, but its norm enters no window.
        """
        found = self.clip(grads, moments, remember=False)
        if (after := found["norm_after"]) > target:
            factor = target / after
            grads.scale(self.measurer, factor)
            found = {**_scaled({"coefficient": 1.0, **found}, factor), "norm_after": target}
            if "groups" in found:
                found["groups"] = {name: _scaled(group, factor) for name, group in found["groups"].items()}
        return {**found, "clip_rate": self.engage(found["clipped"])} if self.config.enable_gradient_clipping else found

    def left_alone(self, norm: float) -> dict[str, Any]:
        """Return the report without clipping: it is off, or a norm that is not finite would spoil every gradient."""
        found = {"clip_type": self.config.effective_clip_type, "norm_before": norm, "norm_after": norm}
        if not self.config.enable_gradient_clipping:
            return {"enabled": False, **found}
        return {**found, "clip_rate": self.clip_rate}

    def _describe(self, norm: float, found: dict[str, Any], *, remember: bool = True) -> dict[str, Any]:
        """Return the report of what was found for a finite norm."""
        if remember:
            self.remember(norm, found)
        found["clip_type"], found["norm_before"] = self.config.effective_clip_type, norm
        found["clip_rate"] = self.clip_rate
        return found

    @property
    def max_grad_norm(self) -> Any:
        """Return the limit of this step, or the limits by group: those of the configuration unless it has its own."""
        return self.config.max_grad_norm if self.limit_of_step is None else self.limit_of_step

    def limited_to(self, limit: float | Mapping[str, float], *, complete: bool = True) -> AbstractContextManager[None]:
        """Check another limit of `complete` gradients, and return a context in which it replaces `max_grad_norm`."""
        config = self.config
        if not complete:
            raise UsageError(
                f"max_grad_norm={limit!r} with accumulate=True: expected it where the gradients are complete. "
                "Pass it with the last micro-batch."
            )
        kind = config.effective_clip_type if config.enable_gradient_clipping else "enable_gradient_clipping=False"
        if kind not in ("norm", "value", "adaptive", "zscore"):
            raise UsageError(
                f"max_grad_norm={limit!r} for one step with {kind}: expected a clip_type that has such a limit. "
                "Set clip_type='norm', or leave it out."
            )
        checked = GradientConfig(max_grad_norm=limit, clip_type=config.effective_clip_type, adaptive_clipping=False)
        return self._limited_to(checked.max_grad_norm)

    @contextmanager
    def _limited_to(self, limit: Any) -> Iterator[None]:
        self.limit_of_step = limit
        try:
            yield
        finally:
            self.limit_of_step = None

    @property
    def limits_groups(self) -> bool:
        """Whether this step limits norms of groups, or norms of another order than the sums of squares tell."""
        limits_norm = self.config.effective_clip_type == "norm"
        return limits_norm and (isinstance(self.max_grad_norm, dict) or self.config.norm_type != 2.0)

    @property
    def limits(self) -> dict[str, float]:
        """Return the limit of each group or pattern; a limit of all gradients is that of one group."""
        limit = self.max_grad_norm
        return limit if isinstance(limit, dict) else {EVERYTHING: limit}

    def limit(self) -> float:
        """Return the limit of the norm for this step, for the strategies that have one."""
        if self.limit_of_step is not None:
            return float(self.limit_of_step)
        return self._strategies[self.config.effective_clip_type].threshold(self.config)

    @property
    def epsilon(self) -> float:
        """Return the epsilon that torch adds to the norm; 0 for limits that follow the norms, whatever their scale."""
        return _TORCH_EPSILON if self.config.effective_clip_type == "norm" else 0.0

    def remember(self, norm: float, found: Mapping[str, Any]) -> None:
        """Update the clip rate and the strategies with a step."""
        self.observe([(norm, found["norm_after"])], Memory.of(self.config))
        self.engage(found["clipped"])

    def observe(self, norms: Sequence[ClippedNorm], memory: Memory) -> None:
        """Update the strategies with the norms of steps; `memory` has the settings of these steps."""
        for strategy in self._strategies.values():
            strategy.observe(norms, memory)

    def engage(self, clipped: bool) -> float:
        """Update the clip rate with a step, and return it."""
        num_steps, bits = self._engaged
        num_steps = num_steps + 1 if num_steps < _RATE_WINDOW else _RATE_WINDOW
        bits = (bits << 1 | (1 if clipped else 0)) & _RATE_BITS
        self._engaged = num_steps, bits  # a single assignment, which an exception cannot split
        return bits.bit_count() / num_steps

    @property
    def is_elementwise(self) -> bool:
        """Whether gradients are limited one element or one unit at a time, and not all by the same factor."""
        return self.config.enable_gradient_clipping and self.config.effective_clip_type in _ELEMENTWISE

    def foresee(
        self, grads: SharedGradients, here: Moments, replace: Callable[[Iterable[Tensor]], None] | None
    ) -> ClippingForecast:
        """Predict elementwise clipping: for each tensor how much it would limit, and the sum of squares after that.

        The gradients do not change, but for NaN and Inf, which `replace` replaces in place. For units that are cut
        between ranks, return the squares that the ranks have to add up first.
        """
        found = np.zeros((len(here.rows), 2))
        cut = self._cut_units(grads)
        if not grads.tensors:  # optimizers inside the backward pass have used them: too late to clip
            return ClippingForecast(found, cut.sums({}).tolist())
        with np.errstate(over="ignore"):  # what is beyond the range is beyond the limit
            found[:, 1] = np.ldexp(here.rows[:, SQUARES], 2 * here.exponent)
        bad = set(here.nonfinite_rows()) if replace is not None else set()
        parts: dict[int, Tensor] = {}
        params = grads.layout.params
        for index in sorted(bad.union(self._beyond(here))):
            param, part = params[index], grads.tensors[index].detach()
            if replace is not None and index in bad:
                part = part.clone()
                replace([part])
            if id(param) in cut:
                parts[id(param)], found[index, 1] = part, 0.0
            else:
                copy = part if index in bad and replace is not None else part.clone()
                count = self._limit(copy, param, grads.stand_ins.get(index))
                norm = self.measurer.measure([copy], np.zeros(1, dtype=np.int64), 1).norm
                found[index] = count, norm * norm
        return ClippingForecast(found, cut.sums(parts).tolist())

    def _cut_units(self, grads: SharedGradients) -> CutUnits:
        """Return the units that are cut between ranks; none if each element is limited by itself."""
        ranks, clip_type = grads.ranks, self.config.effective_clip_type
        if self._cut is None or self._cut[0] is not ranks or self._cut[1] != clip_type:
            # Before the measurement there is a tensor for every parameter.
            self._cut = ranks, clip_type, CutUnits(grads.layout.params if clip_type == "agc" else (), ranks)
        return self._cut[2]

    def _clip_groups(self, grads: Gradients, moments: Moments, norm: float) -> dict[str, Any]:
        """Scale each group by a factor of its own, and return the report; what is in no group stays as it is."""
        limits, order = self.limits, self.config.norm_type
        sets = self.group_limits.sets(grads.layout)
        squares = np.bincount(sets + 1, moments.rows[:, SQUARES], len(limits) + 1)  # the first of what is in no group
        if order == 2.0:
            norms = [finite_norm([0.0, value], moments.exponent) for value in squares[1:].tolist()]
        else:
            norms = grads.norms(order, sets, len(limits)).tolist()
        found = {
            key: {**coefficient_for(before, limit, _TORCH_EPSILON), "norm_before": before}
            for (key, limit), before in zip(limits.items(), norms, strict=True)
        }
        factors = np.array([1.0, *(one["coefficient"] for one in found.values())])
        clipped, after = bool((factors < 1.0).any()), norm
        if clipped:
            grads.scale_some(self.measurer, factors[sets + 1].tolist())
            after = finite_norm([0.0, float(squares @ factors**2)], moments.exponent)
        alone = not isinstance(self.max_grad_norm, dict)
        return {
            "clipped": clipped,
            "threshold": self.max_grad_norm if alone else None,
            "coefficient": float(factors[1]) if alone else after / norm if clipped else 1.0,
            "norm_after": after,
            "norm_type": order,
            "groups": {"all": next(iter(found.values()))} if alone else found,
        }

    def _clip_elements(self, grads: Gradients, moments: Moments, norm: float) -> dict[str, Any]:
        """Limit elements or units, and return the report; over ranks the counts come from `foresee`."""
        count: float
        if isinstance(grads, SharedGradients):
            count, after = self._clip_together(grads, norm)
        else:
            if beyond := self._beyond(moments):
                grads.own()
            tensors, params, stand_ins = grads.tensors, grads.layout.params, grads.stand_ins
            count = sum(self._limit(tensors[index], params[index], stand_ins.get(index)) for index in beyond)
            after = grads.measure(self.measurer).norm if count else norm
        if count:
            grads.install()
        limit, num_limitable = self._elementwise_limit(grads)
        return _elementwise(norm, after, limit, count, num_limitable)

    def _elementwise_limit(self, grads: Gradients) -> tuple[float, int]:
        """Return the limit of each element or unit, and the number of them."""
        if self.config.effective_clip_type == "value":
            return self.max_grad_norm, grads.layout.total_count
        return self.config.agc_clip_factor, num_units(grads)

    def _clip_together(self, grads: SharedGradients, norm: float) -> tuple[float, float]:
        """Limit this rank's parts; return how much all ranks limit, and the norm after that."""
        count, squares = grads.limited.tolist()
        cut = self._cut_units(grads)
        limited = cut.limit(grads.foreseen, self.config.agc_clip_factor)
        if not count + limited.num_limited:
            return 0.0, norm
        for index, (tensor, param) in enumerate(zip(grads.tensors, grads.layout.params, strict=True)):
            if id(param) in cut:
                cut.scale(param, tensor, limited.factors)
            else:
                self._limit(tensor, param, grads.stand_ins.get(index))
        return count + limited.num_limited, math.sqrt(squares + limited.squares)

    def _beyond(self, moments: Moments) -> Sequence[int]:
        """Return the tensors that may have elements or units beyond the limit."""
        if self.config.effective_clip_type == "agc":
            return range(len(moments.rows))
        if not moments.exponent and max(moments.total[MAX], -moments.total[MIN]) <= self.max_grad_norm:
            return ()
        ends = np.maximum(moments.rows[:, MAX], -moments.rows[:, MIN])
        with np.errstate(over="ignore"):
            beyond = np.flatnonzero(np.ldexp(ends, moments.exponent) > self.max_grad_norm)
        return [int(index) for index in beyond]

    def _limit(self, tensor: Tensor, param: nn.Parameter, stand_in: Tensor | None) -> int:
        """Limit the elements or units of a tensor in place; return how many were beyond their limit."""
        if self.config.effective_clip_type == "value":
            return _clamp(tensor, self.max_grad_norm)
        return limit_units(tensor, param, self.config.agc_clip_factor, stand_in)


def clips_apart(config: GradientConfig) -> bool:
    """Say whether gradients are clipped otherwise than all by one factor, which follows from their sum of squares."""
    return config.effective_clip_type in _ELEMENTWISE or config.limits_groups


def clips_by_default(config: GradientConfig) -> bool:
    """Say whether gradients are clipped at a limit that the user has not set."""
    kind = config.effective_clip_type
    return (
        config.enable_gradient_clipping and kind in ("norm", "value") and "max_grad_norm" not in config.model_fields_set
    )


def _scaled(found: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return the fields of what was clipped after it was scaled down once more."""
    coefficient, after = found["coefficient"] * factor, found["norm_after"] * factor
    return {**found, "clipped": True, "coefficient": coefficient, "norm_after": after}


def _elementwise(norm: float, after: float, limit: float, count: float, num_limitable: int) -> dict[str, Any]:
    return {
        "clipped": count > 0,
        "threshold": limit,
        "coefficient": after / norm if norm else 1.0,
        "norm_after": after,
        "clipped_fraction": count / max(1, num_limitable),
    }


def _clamp(grad: Tensor, limit: float) -> int:
    beyond = int((grad.detach().abs() > limit).sum())
    grad.detach().clamp_(-limit, limit)
    return beyond
