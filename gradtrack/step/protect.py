"""Stage 2: protects a step: handles non-finite gradients and spikes, then clips."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from torch import Tensor

from gradtrack.gradients.collected import ForecastClipping, Gradients
from gradtrack.gradients.moments import Moments, true_norm
from gradtrack.protection.clipping import GradientClipper, clips_by_default
from gradtrack.protection.nonfinite import NaNInfHandler, count_nonfinite
from gradtrack.protection.spikes import SpikeDetector
from gradtrack.step.data import StepData
from gradtrack.support.rank import process_rank

_logger = logging.getLogger("gradtrack")
Owned = Callable[[], Iterable[Tensor]]
_CLIPS_LATER: Final = "the program clips by itself, at a norm of {}: what is reported is before its clipping."
_HAS_CLIPPED: Final = (
    "the program clips by itself, at a norm of {}, before gradients are measured: norms are those after its clipping. "
    "Call manager.step(model, optimizer, loss, backward=False) before it clips to see those before."
)
_NOT_LEFT_OUT: Final = (
    "{} cannot act: the optimizers step inside the backward pass, before a step is judged. "
    "Step them after it to have steps left out."
)
_NONE: Final[Mapping[str, Any]] = {"action": "none"}
_OFF: Final[Mapping[str, Any]] = {"action": "off"}


class Protection:
    """Handles non-finite gradients and spikes and clips, as the configuration of the handler and the clipper says."""

    def __init__(self, handler: NaNInfHandler, clipper: GradientClipper, spikes: SpikeDetector) -> None:
        self._handler, self.clipper, self.spikes = handler, clipper, spikes
        self.clips_by_default = clips_by_default(clipper.config)
        """Whether no step has been noted yet that was clipped at a limit which the user has not set."""
        self._told: set[bool] = set()
        self._told_no_spikes = False

    def meet_clipping(self, limit: float, *, usable: bool) -> tuple[bool, str]:
        """Say whether to measure before the program itself clips, and once in words which norms are reported.

        Where a setting asks for a change of the gradients, that is made after the clipping, as the last thing.
        """
        config = self._handler.config
        reports = not config.enable_nan_inf_check or config.nonfinite_action == "report"
        usable = usable and reports and not config.enable_gradient_clipping
        text = "" if math.isinf(limit) or usable in self._told else (_CLIPS_LATER if usable else _HAS_CLIPPED)
        self._told.update([usable] if text else [])
        return usable, text.format(f"{limit:g}")

    def foresight(self, *, scaled: bool) -> ForecastClipping | None:
        """Return a function that predicts elementwise clipping of this rank's gradients; None if the norm suffices."""
        if not self.clipper.is_elementwise:
            return None
        config = self._handler.config
        replaces = config.enable_nan_inf_check and config.nonfinite_action == "replace" and not scaled
        return partial(self.clipper.foresee, replace=self._handler.replace if replaces else None)

    def protect(self, grads: Gradients, moments: Moments, data: StepData, owned: Owned) -> None:
        """Skip, replace or report non-finite gradients, and clip; a skipped step must not move what `owned` returns.

        Where a loss scaler decides, non-finite gradients are counted and left as they are. Further calls of a closure
        do not update the clipping windows.
        """
        if grads.passed:
            data.nan_inf, data.clipping = self._too_late(grads, moments)
            self._note_no_spikes(data)
            return
        remember, checks = not data.repeated, self._handler.config.enable_nan_inf_check
        if self._handler.config.judges_spikes and self._leaves_out(grads, moments, data):
            for param in owned():
                param.grad = None
            return
        if moments.finite or not checks:
            data.nan_inf = _NONE if checks else _OFF
            if data.spike is not None and data.spike["action"] == "clip":
                clipping = self.clipper.clip_spike(grads, moments, self.spikes.target())
            else:
                clipping = self.clipper.clip(grads, moments, remember=remember)
            data.clipping = clipping if moments.finite else _with_true_norm(clipping, moments)
            return
        if data.scale is not None:
            found = {**count_nonfinite(grads.layout.names, moments), "action": "scaler"}
        else:
            found = self._handler.act(grads, moments, owned())
        data.nan_inf = found
        action = found["action"]
        now = moments
        if action == "replace":
            now = self._handler.replaced(grads.layout, [grad.dtype for grad in grads.tensors], moments)
        clipping = _with_true_norm(self.clipper.clip(grads, now, remember=remember), moments)
        if action == "skip":
            clipping["norm_after"] = None
        data.clipping, data.skipped = clipping, action in ("skip", "scaler")
        data.error = self._handler.error(found) if action == "raise" else None

    def _note_no_spikes(self, data: StepData) -> None:
        """Say once that no step can be left out, where a setting asks for it."""
        config = self._handler.config
        if config.judges_spikes and not self._told_no_spikes:
            self._told_no_spikes = True
            asked = ["spike_action"] * (config.spike_action != "report") + ["skip_steps"] * bool(config.skip_steps)
            data.notes = [*data.notes, _NOT_LEFT_OUT.format(" and ".join(asked))]

    def _leaves_out(self, grads: Gradients, moments: Moments, data: StepData) -> bool:
        """Judge whether a step is a spike or listed, and set the fields of its report where it is to be left out."""
        finite = moments.finite
        if data.repeated or not (finite or (data.scale is None and self.spikes.lists(data.step))):
            return False
        data.spike = self.spikes.judge(data.step, moments.norm, data.loss)
        if not data.leaves_out_spike:
            return False
        checks = self._handler.config.enable_nan_inf_check
        counts = {} if finite or not checks else {**count_nonfinite(grads.layout.names, moments), "action": "skip"}
        data.nan_inf = counts or (_NONE if checks else _OFF)
        clipping = {**self.clipper.left_alone(moments.norm), "norm_after": None}
        data.clipping, data.skipped = clipping if finite else _with_true_norm(clipping, moments), True
        return True

    def remember(self, moments: Moments, data: StepData) -> None:
        """Let later steps be judged by a step, and note what was done about it where it is a spike."""
        if not self._handler.config.judges_spikes:
            return
        if moments.finite:
            self.spikes.remember(data.step, moments.norm, data.loss, data.spike)
        if data.spike is not None:
            data.notes, data.event = [*data.notes, self.spikes.tell(data.step, data.spike, data.source)], True
        if self.spikes.coming_notes:
            data.notes, self.spikes.coming_notes = [*data.notes, *self.spikes.coming_notes], []

    def note_default_limit(self, data: StepData) -> None:
        """Say once that gradients are clipped at a limit that the user has not set."""
        if not self.clips_by_default or data.has_own_limit or not data.clipping.get("clipped"):
            return
        config = self.clipper.config
        self.clips_by_default = False
        if clips_by_default(config):
            note = f"clips at max_grad_norm {config.max_grad_norm}, the default"
            data.notes = [*data.notes, f"{note}: set max_grad_norm, or enable_gradient_clipping=False."]
            if process_rank() == 0:
                _logger.warning("%s (step %d%s)", note, data.step, f" of {data.source}" if data.source else "")

    def _too_late(self, grads: Gradients, moments: Moments) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the report fields of gradients that the optimizers have used already, which cannot be changed."""
        counts = {} if moments.finite else count_nonfinite(grads.layout.names, moments)
        checks = self._handler.config.enable_nan_inf_check
        action = "off" if not checks else "none" if moments.finite else "report"
        norm, clip_type = moments.norm, self.clipper.config.effective_clip_type
        clipping = {"enabled": False, "clip_type": clip_type, "norm_before": norm, "norm_after": norm}
        return {**counts, "action": action} if checks else {"action": action}, clipping


def _with_true_norm(clipping: Mapping[str, Any], moments: Moments) -> dict[str, Any]:
    return {**clipping, "norm_before": true_norm(moments.total, moments.exponent)}
