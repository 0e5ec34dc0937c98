"""The loss scale of mixed precision (GradScaler): gradients are unscaled once, and skipped steps are counted."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradtrack.errors import UsageError
from gradtrack.gradients.distributed.shards import local_part
from gradtrack.support.state import Stateful

# From a hook of an optimizer's step up to the scaler's: torch's own wrappers of a step and those of a schedule.
_FRAMES: Final = 12


@dataclass(frozen=True, slots=True)
class Scale:
    """The loss scale of one step, if it is known, and the flags by which its scaler will skip the step.

    `under_way` are the parameters of an optimizer whose step has begun, which no flag can skip any more. `unseen` is
    the number of steps that the scaler has skipped since the last one without a call of any optimizer.
    """

    value: Tensor | float | None
    flags: Sequence[Tensor] = ()
    under_way: Sequence[Tensor] = ()
    unseen: int = 0

    def leave_out(self) -> None:
        """Make the scaler skip the step on every rank and for every optimizer, after an overflow on any of them.

        They decide together, since the gradients of the step were judged and clipped by one norm.
        """
        for flag in self.flags:
            flag.fill_(1.0)
        for param in self.under_way:
            param.grad = None

    def leave_out_where(self, found: Tensor) -> None:
        """Do so where a flag on a device is set, without reading it; no step may be under way."""
        for flag in self.flags:
            local_part(flag).copy_(torch.maximum(local_part(flag), found.to(flag.device, flag.dtype)))


class ScalerLog(Stateful):
    """The number of steps that the loss scaler has skipped, in all and in a row."""

    kept_in_checkpoints = ("_skips", "_in_a_row")

    def __init__(self) -> None:
        self._skips = self._in_a_row = 0

    def update(self, scale: Scale, *, skipped: bool) -> dict[str, Any]:
        """Count a step, and return the fields of a `ScalerReport`; the scale itself may still be on its device."""
        self._skips += scale.unseen + skipped
        self._in_a_row = self._in_a_row + scale.unseen + 1 if skipped else 0
        return {"scale": scale.value, "skips": self._skips, "skips_in_a_row": self._in_a_row}


def unscale(scaler: torch.amp.GradScaler, optimizers: Sequence[Any], *, once: bool) -> Scale | None:
    """Unscale the gradients of optimizers; after its own backward pass (not `once`) the loop may have done so itself.

    Return None for a scaler that is switched off.
    """
    if not optimizers:
        raise UsageError("scaler without an optimizer: expected the one that it steps. Pass it beside the model.")
    stepped = [_stepped(optimizer) for optimizer in optimizers]
    for optimizer in stepped:
        try:
            scaler.unscale_(optimizer)
        except RuntimeError as fault:
            if "already been called" not in str(fault):
                raise
            if once:
                raise UsageError(
                    "a second backward pass before scaler.update(): expected one, since its scaled gradients were "
                    "added to unscaled ones. Pass accumulate=True for all but the last micro-batch."
                ) from fault
    return Scale(_value(scaler), _flags(scaler, stepped)) if scaler.is_enabled() else None


def take_over_scale(optimizer: Any) -> Scale | None:
    """Unscale the gradients of a fused optimizer, which then does not do so in its step; None without a scaler."""
    if not hasattr(optimizer, "found_inf") or not hasattr(optimizer, "grad_scale"):
        return None
    flags = [optimizer.found_inf] if isinstance(optimizer.found_inf, Tensor) else []
    if optimizer.grad_scale is None:
        return Scale(None, flags)
    scale = float(optimizer.grad_scale)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    torch._foreach_mul_([local_part(param.grad) for param in params if param.grad is not None], 1.0 / scale)
    optimizer.grad_scale = None
    return Scale(scale, flags)


class UnseenSkips:
    """Counts the steps that a scaler has skipped since the last one, by its scale, since no optimizer was called."""

    def __init__(self) -> None:
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None
        self._last, self._tracker = 0.0, 0
        self._states: Mapping[int, Any] = {}

    def count(self, scaler: torch.amp.GradScaler) -> int:
        """Return the number of skipped steps, and remember the scaler's state for the next call."""
        scale, expected, before = scaler.get_scale(), self._expected(scaler), self._tracker
        self._scaler, self._last, self._tracker = weakref.ref(scaler), scale, scaler._get_growth_tracker()
        self._states = scaler._per_optimizer_states  # of all optimizers; `update` makes new ones
        # A skipped step restarts the count to the next growth; a scale set by hand does not.
        if not 0.0 < scale < expected or self._tracker >= before > 0:
            return 0
        steps = math.log(scale / expected) / math.log(scaler.get_backoff_factor())
        return round(steps) if math.isclose(steps, round(steps), abs_tol=1e-3) else 0

    def _expected(self, scaler: torch.amp.GradScaler) -> float:
        """Return the scale that the scaler has if it has skipped no step unseen."""
        if self._scaler is None or self._scaler() is not scaler:
            # A scaler that has trained before has a scale of its own.
            return scaler.get_scale() if scaler._get_growth_tracker() else float(scaler._init_scale)
        flags = (flag for state in self._states.values() for flag in state.get("found_inf_per_device", {}).values())
        if any(map(bool, flags)):
            return self._last * scaler.get_backoff_factor()
        return self._last * (scaler.get_growth_factor() if self._tracker + 1 == scaler.get_growth_interval() else 1.0)


def unscale_together(optimizer: Any, others: Sequence[Any], unseen: UnseenSkips) -> Scale | None:
    """Unscale for all optimizers of a step within the step of the first, where the scaler would unscale one by one.

    The optimizer is not given the scaler, which is found among the callers of its step.
    """
    own, scaler = take_over_scale(optimizer), _calling_scaler()
    if scaler is None:
        return own
    states = scaler._per_optimizer_states
    for other in others:
        if other is not optimizer and states[id(other)]["stage"] is OptState.READY:
            scaler.unscale_(other)
    flags = [*(own.flags if own is not None else ()), *_flags(scaler, others)]
    if own is not None:  # a fused optimizer steps whatever the scaler has found
        return Scale(_value(scaler), flags)
    under_way = [param for group in optimizer.param_groups for param in group["params"]]
    return Scale(_value(scaler), flags, under_way, unseen.count(scaler))


def _calling_scaler() -> torch.amp.GradScaler | None:
    """Return the enabled scaler whose `step` is among the callers, or None."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_code.co_name == "step" and isinstance(found := frame.f_locals.get("self"), torch.amp.GradScaler):
            return found if found.is_enabled() else None
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def has_scaler_nearby() -> bool:
    """Say whether a caller has an enabled loss scaler among its variables: its step has yet to decide."""
    frame, found = sys._getframe(1), list[Any]()
    for _ in range(_FRAMES):
        found += [*frame.f_locals.values(), *getattr(frame.f_locals.get("self"), "__dict__", {}).values()]
        if frame.f_back is None:
            break
        frame = frame.f_back
    found += frame.f_globals.values()
    return any(issubclass(type(one), torch.amp.GradScaler) and one.is_enabled() for one in found)


def _stepped(optimizer: Any) -> Any:
    """Return the optimizer that the scaler itself steps: with Accelerate, the one inside its wrapper."""
    return optimizer.optimizer if hasattr(optimizer, "scaler") and hasattr(optimizer, "optimizer") else optimizer


def _value(scaler: torch.amp.GradScaler) -> Tensor | float:
    """Return the scale without waiting for a device; the scaler changes its own tensor in place."""
    scale = getattr(scaler, "_scale", None)
    return scale.detach().clone() if isinstance(scale, Tensor) and not scale.is_cpu else float(scaler.get_scale())


def _flags(scaler: torch.amp.GradScaler, optimizers: Sequence[Any]) -> list[Tensor]:
    states = scaler._per_optimizer_states
    return [flag for one in optimizers for flag in states[id(one)].get("found_inf_per_device", {}).values()]
