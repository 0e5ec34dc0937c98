"""The gradients of a step, here or on all ranks: collected, measured, scaled; deviations where a mean hides them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import compress
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.gradients.distributed.merge import MergedSums, Ranks, Share
from gradtrack.gradients.distributed.shards import add_up, local_gradient
from gradtrack.gradients.groups import Layout
from gradtrack.gradients.measurer import Batch, Measurer
from gradtrack.gradients.moments import MAX, MIN, NAN, SQUARES, SUM, Moments, Rows, count_elements, merge
from gradtrack.gradients.torch_device import WITHOUT_FLOAT64
from gradtrack.gradients.variance import Deviations, hides, is_hidden, merge_deviations, sums_around, take_back


def on_device(grads: Sequence[Tensor]) -> bool:
    """Say whether all gradients are on one accelerator."""
    return bool(grads) and not grads[0].is_cpu and all(grad.device == grads[0].device for grad in grads)


class Gradients:
    """The gradients of one step: the tensors to measure and their layout.

    A sparse gradient is measured by its coalesced values, a complex one by its real and imaginary parts. Coalescing
    changes how an optimizer rounds, so code that changes the tensors calls `own` before it and `install` after it.
    """

    __slots__ = ("_batch", "as_planned", "layout", "stand_ins", "tensors", "touched_rows")

    passed: ClassVar = False
    """Whether the optimizers have already used the gradients, inside the backward pass."""

    def __init__(
        self,
        tensors: list[Tensor],
        layout: Layout,
        touched_rows: dict[str, int],
        stand_ins: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.tensors, self.layout, self.touched_rows = tensors, layout, touched_rows
        self.stand_ins: Mapping[int, Tensor] = stand_ins or {}
        """Sparse gradients coalesced and conjugate ones resolved, by their position; their values are measured."""
        self._batch: Batch | None = None
        self.as_planned = False
        """Whether the gradients were measured by the plan of their layout."""

    @property
    def batch(self) -> Batch | Sequence[Tensor]:
        """Return the batch that the measurer has prepared, or the tensors before that."""
        return self.tensors if self._batch is None else self._batch

    def prepare_as_planned(self, measurer: Measurer) -> bool:
        """Prepare the tensors by the plan of the last step; say whether they have the same types and sizes."""
        plan = self.layout.plan
        if plan is not None and measurer.native is not None and plan.take(self.tensors):
            self._batch, self.as_planned = Batch(self.tensors, range(len(self.tensors)), (), plan), True
        return self.as_planned

    def prepare(self, measurer: Measurer) -> None:
        """Sort the tensors by engine once for all calls of the step; the layout has their sizes."""
        self._batch = batch = measurer.prepare(self.tensors)
        self.layout.plan = batch.plan

    def measure(self, measurer: Measurer) -> Moments:
        """Return the sums of the gradients as they are now."""
        return measurer.measure(self.batch, self.layout.group_of, len(self.layout.group_names))

    def scale(self, measurer: Measurer, coefficient: float) -> None:
        """Multiply the gradients in place."""
        self.own()
        measurer.scale(self.batch, coefficient)
        self.install()

    def scale_some(self, measurer: Measurer, factors: Sequence[float]) -> None:
        """Multiply each gradient in place by a factor of its own; those whose factor is 1 are not written to."""
        self.own()
        for factor in sorted({factor for factor in factors if factor != 1.0}):
            some = [tensor for tensor, own in zip(self.tensors, factors, strict=True) if own == factor]
            measurer.scale(some, factor)
        self.install()

    def norms(self, order: float, sets: NDArray[np.int64], num_sets: int) -> NDArray[np.float64]:
        """Return the norms of an order of sets of gradients, as torch's `clip_grad_norm_` has them.

        `sets` has the set of each gradient, and -1 for those that are in none. Each element is read once more.
        """
        found = _norms(self.tensors, self.layout.params, order)
        return _of_sets(found, order, sets, num_sets)

    def own(self) -> None:
        """Give each parameter a gradient of its own, where parameters share one or elements share their memory.

        A change in place would otherwise change such a gradient twice.
        """
        batch = self.batch
        others = batch.others if isinstance(batch, Batch) else range(len(self.tensors))
        given_twice = len(set(map(id, self.tensors))) < len(self.tensors)
        if not (others or given_twice):
            return
        bad = {index for index in others if _is_expanded(self.tensors[index])}
        if given_twice:
            first: dict[int, int] = {}
            bad |= {index for index, one in enumerate(self.tensors) if first.setdefault(id(one), index) != index}
        if not bad:
            return
        for index in bad - self.stand_ins.keys():
            param = self.layout.params[index]
            assert param.grad is not None
            grad = param.grad = param.grad.detach().clone(memory_format=torch.contiguous_format)
            self.tensors[index] = torch.view_as_real(grad) if grad.is_complex() else grad
        self._batch, self.as_planned = None, False

    def install(self) -> None:
        """Replace sparse and conjugate gradients by the tensors that were measured and changed in their stead."""
        for index, grad in self.stand_ins.items():
            self.layout.params[index].grad = grad

    def count(self) -> Rows:
        """Return the histogram counts of each group: the number of elements in each bucket."""
        return count_elements(self.tensors, self.layout.group_of.tolist(), len(self.layout.group_names))


class ClippingForecast(NamedTuple):
    """The predicted effect of elementwise clipping: how much it limits in each tensor, and the squares after that.

    `sums` are numbers that the ranks add up to decide about units which are cut between them.
    """

    rows: Rows
    sums: Sequence[float] = ()


ForecastClipping = Callable[["SharedGradients", Moments], ClippingForecast]
"""Predicts the effect of elementwise clipping from the sums that this rank has measured."""


class SharedGradients(Gradients):
    """This rank's parts of gradients that are spread over ranks; their measurement returns the sums over all ranks.

    Before the measurement there is a tensor for every parameter, after it for those with a gradient on any rank.
    """

    __slots__ = ("_lay_out", "_num_foreseen", "deviations", "has_gradient", "merged", "positions", "ranks")

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        ranks: Ranks,
        lay_out: Callable[[Sequence[int]], Layout],
        only: Container[int] | None = None,
    ) -> None:
        add_up(params)
        super().__init__(list(map(local_gradient, params)), lay_out(range(len(params))), {})
        self.ranks, self._lay_out = ranks, lay_out
        self.positions = np.arange(len(params))
        """The parameters with a gradient on any rank, of all; before the measurement all of them."""
        wanted = [only is None or id(param) in only for param in params]
        self.has_gradient = np.array([param.grad is not None for param in params]) & wanted
        """Which parameters have a gradient on this rank."""
        self.deviations: Deviations | None = None
        self.merged: MergedSums
        """The result of the last measurement over all ranks."""

    def measure(
        self,
        measurer: Measurer,
        *,
        extra: NDArray[np.float64] | None = None,
        loss: float | None = None,
        ends: bool = True,
        ends_if_nonfinite: bool = False,
        centred: bool = True,
        spread: bool = False,
        limited: ForecastClipping | None = None,
        tally: bool = False,
        more: Sequence[float] = (),
    ) -> Moments:
        """Return the sums over all ranks, and set the further results in `merged`.

        These are the sums of an `extra` number per parameter, the loss, the differences between ranks, the effect of
        elementwise clipping (`limited`), with `tally` the histogram counts of each group, and the sums of `more`.
        Without `ends` the smallest and largest elements stay unknown, which saves a collective, unless
        `ends_if_nonfinite` is set and some element is not finite. Sums are not about centres unless `centred`.
        """
        positions, layout = self.positions, self.layout
        here, counts = self._measure_local(measurer)
        there, sizes = self.has_gradient[positions], np.zeros(len(self.has_gradient), dtype=np.int64)
        counts = counts[there]
        sizes[positions] = layout.sizes
        tensors = list(compress(self.tensors, there))
        foreseen = None if limited is None else limited(self, here)
        self._num_foreseen = 0 if foreseen is None else len(foreseen.sums)
        share = Share(
            rows=here.rows[there],
            present=positions[there],
            counts=counts,
            sizes=sizes,
            around=lambda centres: sums_around(tensors, here.rows[there], counts, centres, here.exponent),
            extra=np.zeros(len(self.has_gradient)) if extra is None else extra,
            limited=None if foreseen is None else foreseen.rows[there],
            tallies=self._tally() if tally else None,
            more=more if foreseen is None else [*foreseen.sums, *more],
            loss=loss,
            ends=ends,
            ends_if_nonfinite=ends_if_nonfinite,
            centred=centred,
            spread=spread,
            exponent=here.exponent,
        )
        return self.take(self.ranks.merge(share))

    def take(self, merged: MergedSums) -> Moments:
        """Return the sums that the ranks have merged, and leave out the parameters without a gradient on any rank."""
        positions, layout = self.positions, self.layout
        self.merged, rows = merged, merged.rows[positions]
        found = merge(rows, layout.group_of, len(layout.group_names))
        moments = Moments(rows, *found, merged.exponent, has_ends=merged.has_ends)
        if not merged.present[positions].all():
            kept = np.flatnonzero(merged.present[positions])
            self._narrow(kept)
            moments = moments.of(kept)
        centred, layout = merged.centred, self.layout
        if merged.counts is not None:  # here a parameter has the size of its shard
            counts_of_all = merged.counts[self.positions].tolist()
            if counts_of_all != layout.counts:
                layout.recount(counts_of_all)
        if centred is not None:
            self.deviations = centred.deviations(self.positions, layout.group_of, len(layout.group_names))
        return moments

    def without_tensors(self) -> SharedGradients:
        """Return what `take` needs, which keeps no gradient alive until the numbers of a step are read."""
        found = copy.copy(self)
        found.tensors, found._batch, found.layout = [], None, copy.copy(self.layout)
        return found

    @property
    def parts(self) -> list[Tensor]:
        """Return a part for every parameter, which is empty without a gradient on this rank."""
        pairs = zip(self.tensors, self.has_gradient, strict=True)
        return [tensor if there else tensor.new_empty(0) for tensor, there in pairs]

    def prepare(self, measurer: Measurer) -> None:
        """Sort this rank's parts by engine; their sizes are not those of the layout."""
        self._batch = measurer.prepare(self.tensors)

    def _measure_local(self, measurer: Measurer) -> tuple[Moments, NDArray[np.int64]]:
        """Return the sums and the element counts of this rank's parts."""
        layout = self.layout
        counts = np.fromiter(map(Tensor.numel, self.tensors), np.int64, len(self.tensors))
        return measurer.measure(self.batch, layout.group_of, len(layout.group_names)), counts

    def own(self) -> None:
        """Do nothing: each parameter has a part of its own."""

    @property
    def limited(self) -> NDArray[np.float64]:
        """Return the effect of elementwise clipping over all ranks: how much it limits, and the squares after that."""
        assert self.merged.limited is not None, "the measurement was made without `limited`"
        found: NDArray[np.float64] = self.merged.limited[self.positions].sum(axis=0)
        return found

    @property
    def foreseen(self) -> Sequence[float]:
        """Return the sums of the predicted numbers by which the ranks decide together."""
        return self.merged.more[: self._num_foreseen]

    @property
    def more(self) -> Sequence[float]:
        """Return the sums of the numbers that were passed as `more`."""
        return self.merged.more[self._num_foreseen :]

    def norms(self, order: float, sets: NDArray[np.int64], num_sets: int) -> NDArray[np.float64]:
        """Return the norms over all ranks, by one collective more for the largest elements, else by two."""
        found = _norms(self.tensors, self.layout.params, order) if self.tensors else np.zeros(len(sets))
        if math.isfinite(order):
            found *= np.array(self.ranks.counts_as())[self.positions] ** (1.0 / order)
        return self.ranks.norms(_of_sets(found, order, sets, num_sets), order)

    def count(self) -> Rows:
        """Return the histogram counts of each group over all ranks, from the measurement."""
        return self.merged.tallies.reshape(len(self.layout.group_names), -1)

    def _tally(self) -> Rows:
        """Return this rank's histogram counts, weighted so that a sum over the ranks has each element once."""
        counts = count_elements(self.tensors, range(len(self.tensors)), len(self.tensors))
        counts[~self.has_gradient[self.positions]] = 0.0
        groups = np.zeros((len(self.layout.group_names), counts.shape[1]))
        np.add.at(groups, self.layout.group_of, self.ranks.once(counts, self.positions))
        return groups

    def _narrow(self, kept: NDArray[np.int64]) -> None:
        """Leave out the parameters that have a gradient on no rank."""
        if self.tensors:
            self._batch, self.tensors = None, [self.tensors[index] for index in kept]
        self.positions = self.positions[kept]
        self.layout = self._lay_out(self.positions.tolist())


def _norms(grads: Sequence[Tensor], params: Sequence[Tensor], order: float) -> NDArray[np.float64]:
    """Return the norm of an order of each gradient, read together; anew where powers leave the range of a float64."""
    if not grads:
        return np.zeros(0)
    narrow = grads[0].device.type in WITHOUT_FLOAT64
    kinds = (torch.float32, torch.complex64) if narrow else (torch.float64, torch.complex128)
    several = list[Tensor]()
    norms = list[Tensor]()
    for grad, param in zip(grads, params, strict=True):
        one = grad.detach()
        one = torch.view_as_complex(one) if param.is_complex() and not one.is_complex() else one
        several.append(one if one.numel() else one.new_zeros(1))
        norm = torch.linalg.vector_norm(several[-1], order, dtype=kinds[one.is_complex()])
        norms.append(norm.to(grads[0].device))
    found: NDArray[np.float64] = torch.stack(norms).cpu().double().numpy()
    for index in np.flatnonzero(~((found > 0) & np.isfinite(found))).tolist():
        one = several[index].to(kinds[several[index].is_complex()])
        largest = one.abs().max()
        if largest > 0:
            found[index] = float(largest) * float(torch.linalg.vector_norm(one / largest, order))
    return found


def _of_sets(norms: NDArray[np.float64], order: float, sets: NDArray[np.int64], num_sets: int) -> NDArray[np.float64]:
    """Return the norm of each set of gradients together, from the norm of each gradient; the set -1 is left out."""
    inside = sets >= 0
    largest = np.zeros(num_sets)
    np.maximum.at(largest, sets[inside], norms[inside])
    if math.isinf(order):
        return largest
    of_each = largest[sets[inside]]
    shares = np.divide(norms[inside], of_each, out=np.zeros(len(of_each)), where=of_each > 0)
    powers: NDArray[np.float64] = largest * np.bincount(sets[inside], shares**order, num_sets) ** (1.0 / order)
    return powers


def _is_expanded(grad: Tensor) -> bool:
    """Say whether several elements share their memory."""
    if grad.layout is not torch.strided or grad.is_contiguous():
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(grad.stride(), grad.shape, strict=True))


def find_deviations(grads: Gradients, moments: Moments) -> Deviations | None:
    """Return the squared deviations if the mean hides a variance, and None on most steps.

    Only tensors whose mean hides their variance are read again. Ranks that share the parameters find them in the
    all-reduce instead. A single element has no variance of its own, but a group of such tensors has.
    """
    rows, layout, groups = moments.rows, grads.layout, (grads.layout.group_of, len(grads.layout.group_names))
    if len(rows) != len(grads.tensors):  # the optimizers have used the gradients inside the backward pass
        return None
    if moments.finite and not moments.may_hide:
        return None
    counts = layout.sizes if moments.finite else layout.sizes - rows[:, NAN:].sum(axis=1)
    hidden = hides(rows, counts)
    if not hidden.any():
        return None
    if moments.finite and counts[hidden].max() < 2:
        wholes = [(moments.group_rows[group], layout.group_counts[group]) for group in set(groups[0][hidden].tolist())]
        wholes.append((moments.total, layout.total_count))
        if not any(count > 1 and is_hidden(row[SUM], row[SQUARES], count) for row, count in wholes):
            return None
    constant = rows[:, MIN] == rows[:, MAX]
    means = np.where(constant, rows[:, MIN], rows[:, SUM] / np.maximum(counts, 1.0))
    centres = np.where(hidden, np.ldexp(means, moments.exponent), 0.0)
    shifted = rows.copy()
    shifted[:, [SUM, SQUARES]] = sums_around(grads.tensors, rows, counts, centres, moments.exponent)
    return merge_deviations(take_back(shifted, np.where(hidden, means, 0.0), counts.astype(np.float64)), *groups)
