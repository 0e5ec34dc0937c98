"""Steps on an accelerator (GPU): their numbers stay on the device until the report is read or the next step."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradtrack.config import GradientConfig
from gradtrack.gradients.collected import Gradients, SharedGradients
from gradtrack.gradients.distributed.device_sums import SharedPlan, fits_on_device
from gradtrack.gradients.moments import Moments, merge
from gradtrack.gradients.torch_device import Sums
from gradtrack.gradients.variance import Deviations, Parts, deviations_of_parts
from gradtrack.protection.clipping import GradientClipper
from gradtrack.protection.nonfinite import NaNInfHandler, count_nonfinite
from gradtrack.protection.spikes import SpikeDetector
from gradtrack.reports import StepReport
from gradtrack.step.data import StepData
from gradtrack.step.loss_scale import Scale


def can_wait(
    config: GradientConfig,
    optimizers: Sequence[Any],
    grads: Gradients,
    clipper: GradientClipper,
    *,
    scale: Scale | None,
) -> bool:
    """Say whether a step can be protected without copying its numbers to the host first.

    A step can be skipped by optimizers that support `found_inf`; for all others the host has to decide. Elements and
    units are limited on a device by Triton only, and by the host units of which ranks have parts,
    and norms of groups or of another order.
    """
    if config.enable_gradient_clipping and clipper.limits_groups:
        return False
    has_flag = bool(optimizers) and all(map(takes_found_inf, optimizers))
    if config.spike_action != "report" and (
        scale is not None or config.spike_action != "skip" or not has_flag or isinstance(grads, SharedGradients)
    ):
        return False
    if isinstance(grads, SharedGradients):
        too_late = scale is not None and scale.under_way
        by_unit = clipper.is_elementwise and config.effective_clip_type == "agc"
        if by_unit or too_late or not fits_on_device(grads):
            return False
    if not clips_there(grads, clipper):
        return False
    if scale is not None or not config.enable_nan_inf_check or config.nonfinite_action in ("replace", "report"):
        return True
    return config.nonfinite_action == "skip" and has_flag


def clips_there(grads: Gradients, clipper: GradientClipper, *, there: bool = True) -> bool:
    """Say whether the engine of gradients that are on a device clips without the host: of elements only Triton does.

    Triton may work on the device of one rank and not on that of another.
    """
    if not (there and clipper.is_elementwise):
        return not clipper.is_elementwise
    weights = [] if grads.stand_ins else grads.layout.params
    plan = clipper.measurer.accelerators.plan(grads.tensors)
    return bool(plan.clips(clipper.config.effective_clip_type, grads.tensors, weights))


def takes_found_inf(optimizer: Any) -> bool:
    """Say whether an optimizer skips a step by itself when its `found_inf` is set, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


class DeviceStep:
    """A step that is measured, clipped and protected on its device; `read` waits for the numbers.

    In a `full` one the variances of float64 gradients are exact where their means hide them, and ranks that share the
    parameters tell each other the smallest and largest elements.
    """

    def __init__(
        self,
        grads: Gradients,
        loss: Tensor | float | None,
        clipper: GradientClipper,
        handler: NaNInfHandler,
        spikes: SpikeDetector,
        *,
        full: bool = False,
    ) -> None:
        self.layout, self._loss = grads.layout, loss
        self._dtypes = [grad.dtype for grad in grads.tensors]
        self._clipper, self._handler, self._full = clipper, handler, full
        self._spikes = spikes
        self._flag: Tensor | None = None
        self.spiked: bool | None = None
        """Whether the device has left the step out as a spike; None where it did not look for one."""
        self.deviations: Deviations | None = None
        self._shares = grads.without_tensors() if isinstance(grads, SharedGradients) else None
        self.ranks: Mapping[str, Any] | None = None
        """The differences between ranks, where they are asked for."""

    def protect(self, grads: Gradients, optimizers: Sequence[Any], *, scale: Scale | None) -> None:
        """Measure the gradients, replace non-finite values, skip and clip, all on the device."""
        config = self._clipper.config
        checks, scaled = config.enable_nan_inf_check, scale is not None
        self._action = "off" if not checks else "scaler" if scaled else config.nonfinite_action
        replacements = None
        if self._action == "replace":
            replacements = {dtype: self._handler.replacement(dtype) for dtype in set(self._dtypes)}
        self._orders = orders = self._clipper.orders(grads, replacements=replacements, variances=self._full)
        changes = orders.limit is not None or replacements is not None
        if changes:
            grads.own()
        tensors = grads.parts if isinstance(grads, SharedGradients) else grads.tensors
        self._plan = self._clipper.measurer.accelerators.plan(tensors)
        if self._shares is not None:
            asked = {"ends": self._full, "spread": config.per_rank, "limits": self._clipper.is_elementwise}
            self._plan, self._loss = SharedPlan(self._plan, self._shares, self._loss, **asked), None
        weights = grads.layout.params if orders.clip_type == "agc" else ()
        numbers = self._plan.start(tensors, orders, weights)
        if changes:
            grads.install()
        if config.spike_action != "report":
            self._flag = self._flag_spike(numbers)
        if self._action == "skip" or self._flag is not None:
            bad = self._plan.found_inf if self._action == "skip" else torch.zeros_like(self._plan.found_inf)
            for optimizer in optimizers:
                optimizer.found_inf = bad if self._flag is None else torch.maximum(bad, self._flag)
        elif scale is not None and self._action == "scaler" and self._shares is not None:
            scale.leave_out_where(self._plan.found_inf)
        self._start_copy(numbers)

    @property
    def readable(self) -> bool:
        """Whether the tensors have data to read, which meta and fake tensors do not."""
        return not (self._packed.is_meta or type(self._packed).__name__ == "FakeTensor")

    def read(self) -> tuple[Moments, float | None]:
        """Return the sums and the loss of the step, after waiting for the device."""
        if self._done is not None:
            self._done.synchronize()
        values, loss = self._host.double().numpy(), self._loss
        if self._shares is not None:
            return self._read_shared(self._shares, values)
        if self._flag is not None:
            values, self.spiked = values[:-1], bool(values[-1])
        if self._has_loss:
            values, loss = values[:-1], float(values[-1])
        layout = self.layout
        num_groups = len(layout.group_names)
        self._sums = sums = self._plan.read(values, self._orders)
        if sums.parts is not None:
            parts = Parts(*sums.parts)
            self.deviations = deviations_of_parts(parts, sums.rows, layout.sizes, layout.group_of, num_groups)
        moments = Moments(sums.rows, *merge(sums.rows, layout.group_of, num_groups))
        return moments, None if loss is None else float(loss)

    def _read_shared(self, shares: SharedGradients, values: NDArray[np.float64]) -> tuple[Moments, float | None]:
        """Return the sums of all ranks and their loss."""
        merged = self._plan.read(values)
        moments = shares.take(merged)
        self.layout, self.ranks = copy.copy(shares.layout), merged.spread
        self._sums = Sums(moments.rows, None, *(() if merged.limited is None else shares.limited.tolist()))
        self._orders = self._orders._replace(num_limitable=self.layout.total_count)
        self._dtypes = [self._dtypes[position] for position in shares.positions]
        return moments, merged.loss

    def protection(self, moments: Moments) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields of a `NanInfReport` and of a `ClippingReport`; the clipper remembers the step."""
        action, now = self._action, moments
        nan_inf: dict[str, Any] = {"action": "off" if action == "off" else "none"}
        if action != "off" and not moments.finite:
            nan_inf = {**count_nonfinite(self.layout.names, moments), "action": action}
            if action == "replace":
                nan_inf["replaced_count"] = moments.nonfinite_count
                now = self._handler.replaced(self.layout, self._dtypes, moments)
        if self.spiked:
            return nan_inf, {**self._clipper.left_alone(moments.norm), "norm_after": None}
        clipping = self._clipper.clipped(now.norm, self._orders, self._sums.num_limited, self._sums.squares_after)
        clipping["norm_before"] = moments.norm
        if nan_inf["action"] == "skip":
            clipping["norm_after"] = None
        return nan_inf, clipping

    def spike(self, moments: Moments, data: StepData) -> dict[str, Any] | None:
        """Return the fields of a `SpikeReport`, if the step is a spike."""
        if self.spiked is None or not moments.finite:
            return None
        found = self._spikes.judge(data.step, moments.norm, data.loss, flagged=self.spiked)
        return {**found, "action": "skip"} if found is not None and self.spiked else found

    def _flag_spike(self, numbers: Tensor) -> Tensor:
        """Return 1.0 on the device where finite gradients or the loss are beyond the limits, else 0.0."""
        with torch.no_grad():
            limits, loss = self._spikes.limits(), self._loss
            beyond = self._plan.norm(numbers) > limits.norm
            if isinstance(loss, Tensor):
                beyond = beyond | ((loss.detach().reshape(()) > limits.loss) & loss.detach().isfinite().reshape(()))
            elif loss is not None:
                beyond = beyond | (limits.loss < loss < math.inf)
            flag: Tensor = (beyond & (self._plan.found_inf == 0)).float()
            return flag

    def _start_copy(self, numbers: Tensor) -> None:
        """Start to copy the numbers of the report to the host, in one copy and without waiting."""
        loss = self._loss
        self._has_loss = isinstance(loss, Tensor) and loss.device == numbers.device
        if isinstance(loss, Tensor) and self._has_loss:
            with torch.no_grad():
                numbers = torch.cat([numbers, loss.reshape(1)])
        if self._flag is not None:
            numbers = torch.cat([numbers, self._flag.reshape(1)])
        self._packed = numbers
        self._done: Any = None
        if numbers.is_meta:
            return
        self._host = numbers.to("cpu", non_blocking=True)
        if self.readable and not numbers.is_cpu:
            self._done = torch.get_device_module(numbers.device).Event()
            self._done.record()


class PendingDeviceStep:
    """A step in the pending ring whose numbers are on a device: reading its report waits for them, as does `settle`.

    `judge` is called with the numbers once they are on the host, `conclude` when the step is settled. Another thread
    than the one that trains may read the report.
    """

    def __init__(
        self,
        report: StepReport,
        data: StepData,
        step: DeviceStep,
        *,
        judge: Callable[[Moments, StepData], object],
        conclude: Callable[[StepReport, StepData], object],
    ) -> None:
        self._report, self._data, self._judge = report, data, judge
        self._step: DeviceStep | None = step
        self._conclude: Callable[[StepReport, StepData], object] | None = conclude
        self._reading = threading.RLock()
        report.defer_to(self._fields)

    def settle(self) -> None:
        """Wait for the numbers and conclude the step; a step whose tensors have no data stays as it is."""
        if self._step is not None and not self._step.readable:
            return
        self._read()
        conclude, self._conclude = self._conclude, None
        if conclude is not None:  # else a callback of the user has raised
            conclude(self._report, self._data)

    def _fields(self) -> Mapping[str, Any]:
        self._read()
        return self._data.fields()

    def _read(self) -> None:
        """Wait for the numbers and judge the step, unless an earlier call has done so."""
        with self._reading:
            step, self._step = self._step, None
            if step is None:
                return
            data = self._data
            moments, data.loss = step.read()
            data.set_moments(moments)
            data.deviations, data.layout, data.ranks = step.deviations, step.layout, step.ranks
            data.nan_inf, data.clipping = step.protection(moments)
            data.spike = step.spike(moments, data)
            data.skipped = data.nan_inf["action"] in ("skip", "scaler") or data.leaves_out_spike
            self._judge(moments, data)
            self._report.defer_to(data.fields)  # so that a report that is kept keeps no model alive
