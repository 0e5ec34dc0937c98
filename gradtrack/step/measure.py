"""Stage 1: collects and measures the gradients of one model at every step, and its weights when a row is due."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.analyzers.base import Snapshot
from gradtrack.config import GradientConfig
from gradtrack.errors import UsageError
from gradtrack.gradients.collected import ForecastClipping, Gradients, SharedGradients, find_deviations
from gradtrack.gradients.distributed.agreement import agree, digest
from gradtrack.gradients.distributed.shards import local_part, unwrapped
from gradtrack.gradients.in_backward import GradientsInBackward, may_step_in_backward, step_in_backward
from gradtrack.gradients.measurer import Measurer
from gradtrack.gradients.moments import SQUARES, Moments, finite_norm, histograms_of
from gradtrack.gradients.parameters import OutsideParameter, ParameterTable
from gradtrack.step.data import StepData


def weight_norms(table: ParameterTable, measurer: Measurer) -> dict[str, float]:
    """Return the norm of each group's weights."""
    moments, names = _measure(table, measurer), table.group_names
    return {
        name: finite_norm(row, moments.exponent) for name, row in zip(names, moments.group_rows.tolist(), strict=True)
    }


def weight_squares(table: ParameterTable, measurer: Measurer) -> NDArray[np.float64]:
    """Return the squared norm of what this rank holds of each parameter."""
    moments = _measure(table, measurer)
    scale: float = np.ldexp(1.0, 2 * moments.exponent)
    return moments.rows[:, SQUARES] * scale


def norms_from_squares(table: ParameterTable, squares: NDArray[np.float64]) -> dict[str, float]:
    """Return the norm of each group's weights from the squared norms of the parameters, added over the ranks."""
    groups = np.bincount(table.group_of, squares, len(table.group_names))
    return dict(zip(table.group_names, np.sqrt(groups).tolist(), strict=True))


def _measure(table: ParameterTable, measurer: Measurer) -> Moments:
    parts = table.params if table.ranks is None else map(local_part, table.params)
    weights = [torch.view_as_real(part.detach()) if part.is_complex() else part for part in parts]
    batch = measurer.prepare(weights, table.plan_of_weights)
    table.plan_of_weights = batch.plan
    return measurer.measure(batch, table.group_of, len(table.group_names))


_LOCAL_PARTS = (
    "the parameters are spread over ranks: analyzers look at the parts that this rank holds, "
    "so their numbers, those of updates excepted, are those of this rank, and an issue that they find opens "
    "where most ranks find it. manager.diagnose() returns the issues that are found on this rank."
)
_NO_RANKS = (
    "per_rank has nothing to compare: the gradients are plain tensors, which DDP makes the same on every rank. "
    "Pass process_group to compare them."
)
_IN_BACKWARD = (
    "the optimizers step inside the backward pass: each gradient is measured just before, "
    "and can neither be clipped nor left out."
)
_DIVIDED = (
    "{} of the {} parameters are measured and clipped with other pairs, whose optimizers own them. "
    "Pass all optimizers as one sequence to clip by the norm of the whole model."
)
_OUTSIDE = (
    "{} parameter(s) of the optimizer are in no module of {}: they are measured, clipped and protected with it, as {}."
)
_OF_EXCHANGE = (
    *("check_frequency", "enable_gradient_monitoring", "enable_nan_inf_check", "grad_log_every_n_steps"),
    *("grad_track_per_weight_matrix", "log_histograms", "nonfinite_action", "norm_type", "per_rank"),
    *("skip_steps", "spike_action", "spike_max_in_a_row", "spike_robust", "spike_threshold", "spike_window"),
)
_MOST_BYTES, _BYTES_OF_GROUP, _BYTES_BESIDE = 128, 48, 184
"""Bytes of a report on one rank: at most for each parameter, for the numbers of a group, and for those of the whole."""


class Measurement:
    """Measures the gradients of a model in one pass, with the parameters, groups and engine of that step.

    Where parameters are spread over ranks it returns the sums over all ranks, which are sent together. Parameters
    whose ids `elsewhere` returns are measured by other pairs.
    """

    def __init__(self, model: nn.Module, config: GradientConfig, measurer: Measurer, process_group: Any = None) -> None:
        self._model, self._config, self._measurer = model, config, measurer
        self._told: set[str] = set()
        self._in_backward: GradientsInBackward | None = None
        self._agreed: tuple[object, ...] = ()
        self._weight_squares: NDArray[np.float64] | None = None
        self.elsewhere: Callable[[], frozenset[int]] = frozenset
        self.left_out: frozenset[int] = frozenset()
        self._outside: list[OutsideParameter] = []
        self.coming_notes: list[str] = []
        self.share(process_group)
        if not self.table.params:
            frozen = " All of its parameters are frozen; set requires_grad on some." if self.table.frozen else ""
            raise UsageError(
                f"model {type(model).__name__} has no trainable parameters: expected at least one.{frozen}"
            )

    def share(self, process_group: Any) -> None:
        """Measure gradients that are spread over the ranks of a group from now on, unless it is None."""
        self._process_group = process_group
        self.table = ParameterTable(
            self._model, self._config.groups, process_group, elsewhere=self.left_out, outside=self._outside
        )
        self.close()
        if step_in_backward(self.table.params):
            self._measure_in_backward()

    def add_outside(self, outside: Sequence[OutsideParameter]) -> None:
        """Measure the parameters, too, that the optimizers own and no module has."""
        if [id(one.param) for one in outside] != [id(one.param) for one in self._outside]:
            self._outside = list(outside)
            self.share(self._process_group)
            if self.table.outside:
                groups = ", ".join(dict.fromkeys(one.group for one in outside))
                self.coming_notes.append(_OUTSIDE.format(len(self.table.outside), type(self._model).__name__, groups))

    def divide(self) -> None:
        """Leave out the parameters that other pairs measure now."""
        left_out = self.elsewhere()
        if left_out == self.left_out:
            return
        self.left_out = left_out
        self.share(self._process_group)
        if left_out:
            self.coming_notes.append(_DIVIDED.format(len(left_out), len(self.table.everything)))

    def close(self) -> None:
        """Remove the hooks that measure gradients inside the backward pass."""
        if self._in_backward is not None:
            self._in_backward.close()
            self._in_backward = None

    def _measure_in_backward(self) -> None:
        """Register hooks that measure gradients inside the backward pass from now on."""
        if self._in_backward is None:
            self._in_backward = GradientsInBackward(self.table.params, self._measurer)
            self.coming_notes.append(_IN_BACKWARD)

    def refresh(self) -> None:
        """Make the table of parameters anew where the model, the groups or the other pairs have changed."""
        if self.table.stale() or self.table.patterns is not self._config.groups:
            self.share(self._process_group)
        if self.elsewhere is not frozenset:
            self.divide()

    def collect(self, only: Container[int] | None = None) -> Gradients:
        """Collect the gradients that the parameters have now; with `only`, those of the parameters with these ids."""
        self.refresh()
        if self._measurer.engine != self._config.engine:
            self._measurer.use(self._config.engine)
        table = self.table
        grads = table.gradients(only)
        if not grads.tensors or table.ranks is not None:
            if self._in_backward is not None and all(param.grad is None for param in self.table.params):
                return self._in_backward.collect(self.table)
            if self._in_backward is None and may_step_in_backward(self.table.params):
                self._measure_in_backward()
        return grads

    def agree_with_ranks(
        self, of_pair: Callable[[], dict[str, Any]], offers: Callable[[], Sequence[str]]
    ) -> list[str] | None:
        """Check that all ranks which share the parameters send the same numbers and decide by the same settings.

        They are compared when the parameters are new, and when a setting that says what is sent has changed, or the
        engine; `of_pair` returns the settings of the pair. Return which of the `offers` every rank makes, or None
        without a check.
        """
        ranks, engine = self.table.ranks, self._config.engine
        if ranks is None or (ranks, settings := self._settings(), engine) == self._agreed:
            return None
        known = {"parameters": len(self.table.names), "names": digest((self.table.names, self.table.group_names))}
        found = agree(ranks.members, {**settings, **known, **of_pair()}, offers())
        self._agreed = ranks, settings, engine
        return [offer for offer, count in found.items() if count == len(ranks.members)]

    def groups_to_send(self) -> list[str]:
        """Return the groups, unless numbers of them would make a report too large to send."""
        ranks, names = self.table.ranks, self.table.group_names
        if ranks is None:
            return names
        clip_type = self._config.effective_clip_type if self._config.enable_gradient_clipping else ""
        room = _MOST_BYTES - ranks.bytes_of_each - {"value": 16, "agc": 32}.get(clip_type, 0)
        return names if _BYTES_OF_GROUP * len(names) + _BYTES_BESIDE <= room * len(self.table.params) else []

    def counts_as(self) -> dict[str, float]:
        """Return for each parameter how often a sum over the ranks has to count what is here."""
        table = self.table
        return {} if table.ranks is None else dict(zip(table.names, table.ranks.counts_as(), strict=True))

    def _settings(self) -> dict[str, Any]:
        """Return the settings that decide which numbers the ranks exchange."""
        config = self._config
        clip_type = config.effective_clip_type if config.enable_gradient_clipping else None
        return {"clip_type": clip_type, **{name: getattr(config, name) for name in _OF_EXCHANGE}}

    def read(self, grads: Gradients, data: StepData, loss: Tensor | float | None, *, row_due: bool) -> Moments:
        """Measure the gradients and the loss; if a row is due, count the histograms for it as well."""
        if not grads.prepare_as_planned(self._measurer):
            self.fit(grads, data)
            grads.prepare(self._measurer)
        moments = grads.measure(self._measurer)
        data.loss = None if loss is None else float(loss)
        data.set_moments(moments)
        if data.full and (moments.may_hide or not moments.finite):
            data.deviations = find_deviations(grads, moments)
        if row_due and self._config.log_histograms:
            self._tally(grads, data)
        return moments

    def read_shared(
        self,
        grads: SharedGradients,
        data: StepData,
        loss: Tensor | float | None,
        *,
        row_due: bool,
        first_nonfinite: bool,
        limited: ForecastClipping | None,
        more: Sequence[float],
    ) -> Moments:
        """Measure gradients of all ranks and the loss; where the step is reported the weights too; and `more` numbers.

        `limited` adds the effect of clipping, and `first_nonfinite` the statistics of a row if any element is not
        finite. The arguments must follow from the step and the settings alone, so that all ranks send the same.
        """
        # An issue may make a row of this step, but it opens after the ranks have sent their numbers. Where others leave
        # theirs on a device, this rank sends the same as they.
        config, alone = self._config, data.can_stay
        with_weights = data.full and data.with_groups and not alone
        grads.prepare(self._measurer)
        moments = grads.measure(
            self._measurer,
            extra=weight_squares(self.table, self._measurer) if with_weights else None,
            loss=None if loss is None else float(loss),
            ends=data.full,
            ends_if_nonfinite=first_nonfinite and config.enable_gradient_monitoring and not alone,
            centred=not alone,
            spread=data.full and config.per_rank,
            limited=limited,
            tally=row_due and config.log_histograms,
            more=more,
        )
        merged = grads.merged
        # The sizes in a layout change with the gradients, and this report may be read after that.
        data.layout, data.ranks, data.loss = copy.copy(grads.layout), merged.spread, merged.loss
        data.deviations = grads.deviations
        self._weight_squares = merged.extra if with_weights else None
        data.set_moments(moments)
        if row_due and self._config.log_histograms:
            self._tally(grads, data)
        return moments

    def _tally(self, grads: Gradients, data: StepData) -> None:
        """Count the elements of the gradients for histograms."""
        data.histograms = histograms_of(grads.count(), grads.layout.group_names if data.with_groups else ())

    def fit(self, grads: Gradients, data: StepData) -> None:
        """Update the sizes in the layout, where a parameter was given data of another shape."""
        if self.table.ranks is None and grads.tensors and list(map(Tensor.numel, grads.tensors)) != grads.layout.counts:
            self.table.resize(grads)
            data.layout = grads.layout

    def measure_weights(self, data: StepData, owned: Iterable[nn.Parameter]) -> None:
        """Set the norms of the groups' weights where a row is due; ranks have sent them with the gradients."""
        if data.weight_norms or not (data.event and data.full and data.with_groups):
            return
        data.weight_version = sum(param._version for param in owned)
        if self.table.ranks is None:
            data.weight_norms = weight_norms(self.table, self._measurer)
        elif self._weight_squares is not None:
            data.weight_norms = norms_from_squares(self.table, self._weight_squares)

    @property
    def is_plain(self) -> bool:
        """Whether the gradients are on one rank, belong to one pair, and are measured after the backward pass."""
        return self.table.ranks is None and self.elsewhere is frozenset and self._in_backward is None

    @property
    def has_shards(self) -> bool:
        """Whether this rank holds only parts of any parameter."""
        return self.table.ranks is not None and bool(self.table.ranks.sharded.any())

    def snapshot(self, grads: Gradients, step: int, optimizers: Sequence[Any], **fields: Any) -> Snapshot:
        """Return a snapshot of the gradients alone: of this rank's shards, before the all-reduce of the sums."""
        tensors = dict(zip(grads.layout.names, grads.tensors, strict=True)) if grads.tensors else {}
        return Snapshot(
            step=step,
            model=unwrapped(self._model),
            optimizers=optimizers,
            gradients=self.table.within(tensors),
            elsewhere=self.left_out,
            counts_as=self.counts_as() if self.has_shards else None,
            **fields,
        )

    def notes(self, *, analyzed: bool) -> list[str]:
        """Return the notes on how parameters are spread over ranks or shared with other pairs, each once."""
        alone = self.table.ranks is None
        found = [_LOCAL_PARTS] if analyzed and self.has_shards else []
        if self._config.per_rank and alone:
            found.append(_NO_RANKS)
        found += self.coming_notes
        self.coming_notes = []
        new = [note for note in found if note not in self._told]
        self._told.update(new)
        return new
