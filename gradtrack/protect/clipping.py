"""Clipping: one decision from one measurement, and one pass over the gradients only when it engages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradtrack.config import ClipType, GradientConfig
from gradtrack.errors import UsageError
from gradtrack.measure.measurer import Measurer
from gradtrack.measure.moments import MAX, MIN, Moments
from gradtrack.measure.shards import local_part
from gradtrack.measure.table import Gradients, ParameterTable, SharedGradients
from gradtrack.protect.strategies import AdaptiveStrategy, FixedStrategy, Strategy, ZScoreStrategy
from gradtrack.reports import ClippingReport

_RATE_WINDOW: Final = 100
_TORCH_EPSILON: Final = 1e-6
_AGC_SMALLEST_WEIGHT: Final = 1e-3


class GradientClipper:
    """Clips the gradients of a model by the strategy of its configuration, and remembers what that strategy needs.

    `norm`, `adaptive` and `zscore` scale all gradients by one factor `min(1, limit / (norm + 1e-6))`, as
    `torch.nn.utils.clip_grad_norm_` does. `value` clamps each element and `agc` limits the gradient of each unit (row)
    to a multiple of its weights' norm (Brock et al. 2021); their coefficient is the norm after over the norm before.
    """

    def __init__(self, config: GradientConfig | None = None, *, measurer: Measurer | None = None) -> None:
        self.config = config if config is not None else GradientConfig()
        self._measurer = measurer if measurer is not None else Measurer(self.config.engine)
        self._strategies: dict[ClipType, Strategy] = {
            "norm": FixedStrategy(),
            "adaptive": AdaptiveStrategy(),
            "zscore": ZScoreStrategy(),
        }
        self._engaged: deque[bool] = deque(maxlen=_RATE_WINDOW)
        self._engaged_count = 0

    @property
    def clip_rate(self) -> float:
        """Return the share of the last hundred steps in which clipping engaged."""
        return self._engaged_count / len(self._engaged) if self._engaged else 0.0

    def clip_gradients(self, model: nn.Module) -> ClippingReport:
        """Measure and clip the gradients that a model has now."""
        grads = ParameterTable(model).gradients()
        moments = grads.measure(self._measurer)
        return ClippingReport(**self.clip(grads, moments))

    def clip(self, grads: Gradients, moments: Moments, *, remember: bool = True) -> dict[str, Any]:
        """Clip gradients that were measured, and return the fields of a `ClippingReport`."""
        clip_type = self.config.effective_clip_type
        norm = moments.norm
        if not self.config.enable_gradient_clipping:
            return {"enabled": False, "clip_type": clip_type, "norm_before": norm, "norm_after": norm}
        if not math.isfinite(norm):
            return self._left_alone(clip_type, norm)
        if clip_type == "value":
            found = self._clip_values(grads, moments, norm)
        elif clip_type == "agc":
            found = self._clip_units(grads, norm)
        else:
            found = self._clip_norm(grads, norm)
        if remember:
            self.remember(norm, found)
        return {"clip_type": clip_type, "norm_before": norm, **found, "clip_rate": self.clip_rate}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that rolls, as plain data."""
        strategies = {name: strategy.state_dict() for name, strategy in self._strategies.items()}
        return {"strategies": strategies, "engaged": list(self._engaged)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        for name, strategy in self._strategies.items():
            strategy.load_state_dict(state["strategies"][name])
        self._engaged = deque(state["engaged"], maxlen=_RATE_WINDOW)
        self._engaged_count = sum(self._engaged)

    def _left_alone(self, clip_type: ClipType, norm: float) -> dict[str, Any]:
        """Scale nothing by a norm that is not finite, since that would make every gradient non-finite."""
        return {"clip_type": clip_type, "norm_before": norm, "norm_after": norm, "clip_rate": self.clip_rate}

    def limit(self) -> float:
        """Return the limit of the norm for the coming step, for the strategies that have one."""
        return self._strategies[self.config.effective_clip_type].threshold(self.config)

    @property
    def epsilon(self) -> float:
        """Return what torch adds to the norm; a limit that follows the norms is kept free of absolute numbers."""
        return _TORCH_EPSILON if self.config.effective_clip_type == "norm" else 0.0

    def remember(self, norm: float, found: Mapping[str, Any]) -> None:
        """Let the strategies and the clip rate know of a step."""
        for strategy in self._strategies.values():
            strategy.observe(norm, found["norm_after"], self.config)
        if len(self._engaged) == _RATE_WINDOW:
            self._engaged_count -= self._engaged[0]
        self._engaged.append(found["clipped"])
        self._engaged_count += found["clipped"]

    def _clip_norm(self, grads: Gradients, norm: float) -> dict[str, Any]:
        found = coefficient_for(norm, self.limit(), self.epsilon)
        if found["clipped"]:
            self._measurer.scale(grads.batch, found["coefficient"])
            grads.install()
        return found

    def _clip_values(self, grads: Gradients, moments: Moments, norm: float) -> dict[str, Any]:
        limit = self.config.max_grad_norm
        scale = math.ldexp(1.0, moments.exponent)
        beyond = [row[MAX] * scale > limit or row[MIN] * scale < -limit for row in moments.rows]
        counts = [_clamp(grad, limit) if far else 0 for grad, far in zip(grads.tensors, beyond, strict=True)]
        found = self._elementwise(grads, norm, limit, any(beyond), counts)
        return {**found, "clipped_fraction": found["clipped_fraction"] / max(1, grads.layout.total_count)}

    def _clip_units(self, grads: Gradients, norm: float) -> dict[str, Any]:
        factor = self.config.agc_clip_factor
        if isinstance(grads, SharedGradients) and grads.has_shards:
            raise UsageError(
                "clip_type 'agc' with sharded parameters: expected each unit of a parameter on one rank. "
                "Use clip_type 'norm', 'adaptive', 'zscore' or 'value'."
            )
        pairs = enumerate(zip(grads.tensors, grads.layout.params, strict=True))
        found = [_limit_units(*pair, factor, grads.sparse.get(index)) for index, pair in pairs]
        clipped, units = sum(pair[0] for pair in found), sum(pair[1] for pair in found)
        share = clipped / max(1, units)
        return {**self._elementwise(grads, norm, factor, clipped > 0, ()), "clipped_fraction": share}

    def _elementwise(
        self, grads: Gradients, norm: float, threshold: float, clipped: bool, counts: Sequence[int]
    ) -> dict[str, Any]:
        after, count = norm, float(sum(counts))
        if clipped:
            grads.install()
        if clipped and isinstance(grads, SharedGradients):
            sent = grads.spread(counts or [0.0] * len(grads.tensors))
            after = grads.measure(self._measurer, extra=sent, ends=False).norm
            count = float(grads.merged.extra.sum())
        elif clipped:
            after = grads.measure(self._measurer).norm
        return {
            "clipped": clipped,
            "threshold": threshold,
            "coefficient": after / norm if norm else 1.0,
            "norm_after": after,
            "clipped_fraction": count,
        }


def coefficient_for(norm: float, threshold: float, epsilon: float) -> dict[str, Any]:
    """Return what clipping a norm to a threshold means, with torch's own epsilon as torch's own function scales it."""
    coefficient = threshold / (norm + epsilon) if norm + epsilon > 0 else 1.0
    if coefficient >= 1.0:
        return {"clipped": False, "threshold": threshold, "coefficient": 1.0, "norm_after": norm}
    return {"clipped": True, "threshold": threshold, "coefficient": coefficient, "norm_after": norm * coefficient}


def _clamp(grad: Tensor, limit: float) -> int:
    beyond = int((grad.detach().abs() > limit).sum())
    grad.detach().clamp_(-limit, limit)
    return beyond


def _limit_units(grad: Tensor, param: nn.Parameter, factor: float, sparse: Tensor | None) -> tuple[int, int]:
    """Scale down the units whose gradient is too large for their weights; return how many, of how many."""
    grad, weight = grad.detach(), local_part(param.detach())
    if weight.is_complex():
        weight = torch.view_as_real(weight)
    if sparse is not None:
        weight = weight[tuple(sparse._indices())]
    dims = _unit_dims(grad)
    limit = _norms(weight, dims).clamp_min(_AGC_SMALLEST_WEIGHT) * factor
    norms = _norms(grad, dims)
    beyond = norms > limit
    count = int(beyond.sum())
    if count:
        grad.mul_(torch.where(beyond, limit / norms.clamp_min(torch.finfo(norms.dtype).tiny), 1.0).to(grad.dtype))
    return count, beyond.numel()


def _unit_dims(grad: Tensor) -> Sequence[int]:
    return tuple(range(grad.ndim)) if grad.ndim <= 1 else tuple(range(1, grad.ndim))


def _norms(values: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the norm of each unit, in a precision whose squares do not overflow."""
    wide = values if values.dtype == torch.float64 else values.float()
    return torch.linalg.vector_norm(wide, dim=tuple(dims), keepdim=True) if dims else wide.abs()
