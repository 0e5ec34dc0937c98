"""Steps on an accelerator (GPU): their numbers stay on the device until the report is read or the next step."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrack.config import GradientConfig
from gradtrack.gradients import torch_device
from gradtrack.gradients.collected import Gradients
from gradtrack.gradients.moments import MAX, MIN, NAN, NEGINF, POSINF, SQUARES, Moments, merge
from gradtrack.gradients.variance import Deviations, deviations_around
from gradtrack.protection.clipping import GradientClipper, coefficient_for
from gradtrack.protection.nonfinite import NaNInfHandler, count_nonfinite
from gradtrack.reports import StepReport
from gradtrack.step.data import StepData

_TOGETHER = ("norm", "adaptive", "zscore")


def can_wait(config: GradientConfig, optimizers: Sequence[Any], *, scaled: bool) -> bool:
    """Say whether a step can be protected without copying its numbers to the host first.

    A step can be skipped by optimizers that support `found_inf`; for all others the host has to decide.
    """
    if config.enable_gradient_clipping and config.effective_clip_type not in _TOGETHER:
        return False
    if scaled or not config.enable_nan_inf_check or config.nonfinite_action in ("replace", "report"):
        return True
    return config.nonfinite_action == "skip" and bool(optimizers) and all(map(takes_found_inf, optimizers))


def takes_found_inf(optimizer: Any) -> bool:
    """Say whether an optimizer skips a step by itself when its `found_inf` is set, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


class DeviceStep:
    """A step that is measured, clipped and protected on its device; `read` waits for the numbers.

    With `variances` a second pass keeps the variances of float64 gradients exact where their means hide them.
    """

    def __init__(
        self,
        grads: Gradients,
        loss: Tensor | float | None,
        clipper: GradientClipper,
        handler: NaNInfHandler,
        *,
        variances: bool = False,
    ) -> None:
        self._layout, self._config = grads.layout, clipper.config
        self._groups = grads.layout.group_of, len(grads.layout.group_names)
        self._clipper, self._handler = clipper, handler
        self._rows = torch_device.measure(grads.tensors, exact=True)
        wide = [index for index, grad in enumerate(grads.tensors) if grad.dtype == torch.float64]
        self._wide = wide if variances else []
        self._around = self._rows.new_zeros(0, 3)
        if self._wide:
            ends = self._rows[self._wide, MIN : MAX + 1]
            self._around = torch_device.measure_around([grads.tensors[index] for index in self._wide], ends)
        self.deviations: Deviations | None = None
        self._bad = self._rows.narrow(1, NAN, 3).sum()
        self._loss = loss
        self._limit: float | None = None
        self._limits: Any = [handler.limit_of(grad) for grad in grads.tensors]
        self._action = "none"

    def protect(self, grads: Gradients, optimizers: Sequence[Any], *, scaled: bool) -> None:
        """Replace non-finite values, skip and clip by operations on the device."""
        config = self._config
        self._action = "off" if not config.enable_nan_inf_check else "scaler" if scaled else config.nonfinite_action
        if self._action == "replace":
            grads.own()
            self._handler.replace(grads.tensors)
            grads.install()
        if self._action == "skip":
            for optimizer in optimizers:
                optimizer.found_inf = (self._bad > 0).float()
        if config.enable_gradient_clipping:
            grads.own()
            self._limit = self._clipper.limit()
            norm = self._norm_to_clip(grads)
            coefficient = (self._limit / (norm + self._clipper.epsilon)).clamp(max=1.0)
            if self._action != "replace":
                coefficient = torch.where(self._bad > 0, 1.0, coefficient)
            torch._foreach_mul_(list(grads.tensors), coefficient.float())
            grads.install()
        self._start_copy()

    @property
    def readable(self) -> bool:
        """Whether the tensors have data to read, which meta and fake tensors do not."""
        return not (self._packed.is_meta or type(self._packed).__name__ == "FakeTensor")

    def read(self) -> tuple[Moments, float | None]:
        """Return the sums and the loss of the step, after waiting for the device."""
        if self._done is not None:
            self._done.synchronize()
        values = self._host.double().numpy()
        size, end = self._rows.numel(), self._rows.numel() + self._around.numel()
        rows, around = np.array(values[:size]).reshape(self._rows.shape), values[size:end].reshape(-1, 3)
        self.deviations = deviations_around(rows, self._wide, around, self._layout.sizes, self._groups)
        loss = self._loss
        if isinstance(loss, Tensor):
            loss = float(values[end]) if len(values) > end else float(loss)
        return Moments(rows, *merge(rows, self._layout.group_of, len(self._layout.group_names))), loss

    def nan_inf(self, moments: Moments) -> dict[str, Any]:
        """Return the fields of a `NanInfReport`."""
        if self._action == "off" or moments.finite:
            return {"action": "off" if self._action == "off" else "none"}
        found = {**count_nonfinite(self._layout.names, moments), "action": self._action}
        return {**found, "replaced_count": moments.nonfinite_count} if self._action == "replace" else found

    def clipping(self, moments: Moments) -> dict[str, Any]:
        """Return the fields of a `ClippingReport`, and update the clipper as a step on the host does."""
        clipper, norm = self._clipper, moments.norm
        clip_type = self._config.effective_clip_type
        if self._limit is None:
            return {"enabled": False, "clip_type": clip_type, "norm_before": norm, "norm_after": norm}
        seen = norm
        if self._action == "replace" and not moments.finite:
            seen = math.sqrt(moments.total[SQUARES] + self._replaced_squares(moments.rows).sum())
        if not math.isfinite(seen):
            after = None if self._action == "skip" else norm
            return {"clip_type": clip_type, "norm_before": norm, "norm_after": after, "clip_rate": clipper.clip_rate}
        found = coefficient_for(seen, self._limit, self._clipper.epsilon)
        clipper.remember(seen, found)
        return {"clip_type": clip_type, "norm_before": norm, **found, "clip_rate": clipper.clip_rate}

    def _norm_to_clip(self, grads: Gradients) -> Tensor:
        squares = self._rows.select(1, SQUARES)
        if self._action == "replace":
            squares = squares + self._replaced_squares(self._rows)
        return squares.sum().sqrt()

    def _replaced_squares(self, rows: Any) -> Any:
        """Return the squares that the replacements add to each tensor."""
        nan = self._config.replace_nan_with
        if not isinstance(rows, Tensor):
            return rows[:, NAN] * nan**2 + (rows[:, POSINF] + rows[:, NEGINF]) * np.array(self._limits) ** 2
        limits = torch.tensor(self._limits, dtype=rows.dtype).to(rows.device, non_blocking=True)
        infinities = rows.select(1, POSINF) + rows.select(1, NEGINF)
        return rows.select(1, NAN) * nan**2 + infinities * limits**2

    def _start_copy(self) -> None:
        """Start to copy the numbers of the report to the host, in one copy and without waiting."""
        parts = [self._rows.flatten(), self._around.flatten()]
        if isinstance(self._loss, Tensor) and self._loss.device == self._rows.device:
            parts.append(self._loss.detach().to(self._rows.dtype).reshape(1))
        self._packed = torch.cat(parts)
        self._done: Any = None
        if self._packed.is_meta:
            return
        self._host = self._packed.to("cpu", non_blocking=True)
        if self._packed.is_cuda and self.readable:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
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

    def _fields(self) -> dict[str, Any]:
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
            data.deviations = step.deviations
            data.nan_inf, data.clipping = step.nan_inf(moments), step.clipping(moments)
            data.skipped = data.nan_inf["action"] in ("skip", "scaler")
            self._judge(moments, data)
            self._report.defer_to(data.fields)  # so that a report that is kept keeps no model alive
