"""The parameters of a model, resolved once and re-checked cheaply on every step."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.errors import UsageError
from gradtrack.measure import grouping
from gradtrack.measure.histograms import count_elements
from gradtrack.measure.measurer import Batch, Measurer
from gradtrack.measure.moments import Moments, Rows, merge
from gradtrack.measure.ranks import Merged, Ranks, Share
from gradtrack.measure.shards import group_of_modules, is_distributed, local_gradient, replicated_params, unwrapped

_grad = attrgetter("grad")
_requires_grad = attrgetter("requires_grad")
_layout = attrgetter("layout")
_values = dict.values
_DENSE: Final = frozenset({torch.strided})


class Layout:
    """The names, groups and sizes of the gradients that are there, which stay the same from step to step."""

    __slots__ = (
        "counts",
        "group_counts",
        "group_names",
        "group_of",
        "missing",
        "names",
        "params",
        "sizes",
        "total_count",
    )

    def __init__(
        self,
        names: list[str],
        params: list[nn.Parameter],
        counts: Sequence[int],
        group_of: NDArray[np.int64],
        group_names: list[str],
        missing: list[str],
    ) -> None:
        self.names, self.params, self.missing = names, params, missing
        self.group_of, self.group_names = group_of, group_names
        self.recount(counts)

    def recount(self, counts: Sequence[int]) -> None:
        """Take new sizes, as those of sparse gradients are on every step."""
        self.counts = list(counts)
        self.sizes = np.array(self.counts, dtype=np.int64)
        sums = np.bincount(self.group_of, weights=self.counts, minlength=len(self.group_names))
        self.group_counts = [int(count) for count in sums]
        self.total_count = sum(self.counts)


class Gradients:
    """The gradients of one step: the tensors to measure and their layout.

    A sparse gradient is measured by its coalesced values, a complex one by its real and imaginary parts. Coalescing
    changes how an optimizer rounds, so whoever changes the tensors calls `install`.
    """

    __slots__ = ("batch", "layout", "sparse", "tensors", "touched_rows")

    def __init__(
        self,
        tensors: list[Tensor],
        layout: Layout,
        touched_rows: dict[str, int],
        sparse: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.tensors, self.layout, self.touched_rows = tensors, layout, touched_rows
        self.sparse: Mapping[int, Tensor] = sparse or {}
        """The coalesced sparse gradients by their position, whose values are among the tensors."""
        self.batch: Batch | Sequence[Tensor] = tensors
        """The tensors as the measurer has prepared them, or as they are."""

    def measure(self, measurer: Measurer) -> Moments:
        """Return the sums of the gradients as they are now."""
        return measurer.measure(self.batch, self.layout.group_of, len(self.layout.group_names))

    def install(self) -> None:
        """Put what was measured of sparse gradients in their place, since its values have changed."""
        for index, grad in self.sparse.items():
            self.layout.params[index].grad = grad

    def count(self) -> Rows:
        """Return for each group how many elements are in each bucket of a histogram."""
        return count_elements(self.tensors, self.layout.group_of.tolist(), len(self.layout.group_names))


Foresight = Callable[["SharedGradients", Moments], NDArray[np.float64]]
"""Tells from what this rank has measured, for each tensor, how much an elementwise clipping would limit, and what
sum of squares it would leave."""


class SharedGradients(Gradients):
    """The parts of the gradients that this rank has, whose sums are those of all ranks.

    Until it is measured it has a tensor for every parameter, then for those that have a gradient on any rank.
    """

    __slots__ = ("_has_gradient", "_lay_out", "_positions", "merged", "ranks")

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        ranks: Ranks,
        lay_out: Callable[[Sequence[int]], Layout],
        only: Container[int] | None = None,
    ) -> None:
        super().__init__(list(map(local_gradient, params)), lay_out(range(len(params))), {})
        self.ranks, self._lay_out = ranks, lay_out
        self._positions = np.arange(len(params))
        wanted = [only is None or id(param) in only for param in params]
        self._has_gradient = np.array([param.grad is not None for param in params]) & wanted
        self.merged: Merged
        """What the last measurement has found over all ranks."""

    def measure(
        self,
        measurer: Measurer,
        *,
        extra: NDArray[np.float64] | None = None,
        loss: float | None = None,
        ends: bool = True,
        ends_if_nonfinite: bool = False,
        spread: bool = False,
        limited: Foresight | None = None,
        tally: bool = False,
    ) -> Moments:
        """Return the sums over all ranks, and leave what else was asked for in `merged`.

        That are the sums of an extra number per parameter, the loss, how the ranks differ, what an elementwise
        clipping is going to do and, with `tally`, the counts of a histogram for each group. Without `ends` the smallest
        and largest elements stay unknown, which saves a collective, unless some element is not finite.
        """
        positions, layout = self._positions, self.layout
        here = measurer.measure(self.batch, layout.group_of, len(layout.group_names))
        there = self._has_gradient[positions]
        share = Share(
            rows=here.rows[there],
            present=positions[there],
            counts=np.array([tensor.numel() for tensor in self.tensors])[there],
            extra=np.zeros(len(self._has_gradient)) if extra is None else extra,
            limited=None if limited is None else limited(self, here)[there],
            tallies=self._tally() if tally else None,
            loss=loss,
            ends=ends,
            ends_if_nonfinite=ends_if_nonfinite,
            spread=spread,
            exponent=here.exponent,
        )
        self.merged = merged = self.ranks.merge(share)
        rows = merged.rows[positions]
        found = merge(rows, layout.group_of, len(layout.group_names))
        moments = Moments(rows, *found, merged.exponent, has_ends=merged.has_ends)
        if not merged.present[positions].all():
            kept = np.flatnonzero(merged.present[positions])
            self._narrow(kept)
            moments = moments.of(kept)
        self._recount()
        return moments

    @property
    def limited(self) -> NDArray[np.float64]:
        """Return what an elementwise clipping does over all ranks: how much it limits, and the squares it leaves."""
        assert self.merged.limited is not None, "nobody has asked what a clipping would do"
        found: NDArray[np.float64] = self.merged.limited[self._positions].sum(axis=0)
        return found

    @property
    def has_shards(self) -> bool:
        """Whether a rank holds only parts of any of these parameters."""
        return bool(self.ranks.sharded[self._positions].any())

    def count(self) -> Rows:
        """Return the same over all ranks, as it was counted while they were measured."""
        return self.merged.tallies.reshape(len(self.layout.group_names), -1)

    def _tally(self) -> Rows:
        """Count what this rank has for each group, so that a sum over the ranks has each element once."""
        counts = count_elements(self.tensors, range(len(self.tensors)), len(self.tensors))
        counts[~self._has_gradient[self._positions]] = 0.0
        groups = np.zeros((len(self.layout.group_names), counts.shape[1]))
        np.add.at(groups, self.layout.group_of, self.ranks.once(counts, self._positions))
        return groups

    def _narrow(self, kept: NDArray[np.int64]) -> None:
        """Leave out the parameters that have a gradient on no rank."""
        self.batch = self.tensors = [self.tensors[index] for index in kept]
        self._positions = self._positions[kept]
        self.layout = self._lay_out(self._positions.tolist())

    def _recount(self) -> None:
        """Take the sizes that all ranks have together, where a parameter here knows only its own."""
        if self.merged.counts is None:
            return
        counts = self.merged.counts[self._positions].tolist()
        if counts != self.layout.counts:
            self.layout.recount(counts)


class ParameterTable:
    """The trainable parameters of a model by name and group, each once, with the other names of tied ones.

    With a process group the gradients are those of all its ranks, also where nothing about a tensor says so. The
    parameters with the ids in `elsewhere` are left to another table.
    """

    def __init__(
        self,
        model: nn.Module,
        patterns: Mapping[str, str] | None = None,
        process_group: Any = None,
        *,
        elsewhere: Container[int] = (),
    ) -> None:
        wrapped, model = list(model.modules()), unwrapped(model)
        self._modules = list(model.modules())
        # A ScriptModule has wrappers in their place, made anew on every call, and cannot change its parts.
        plain = [module for module in self._modules if not isinstance(module, torch.jit.ScriptModule)]
        self._module_dicts = [module._modules for module in plain]
        self._param_dicts = [module._parameters for module in plain]
        self._fingerprint = self._take_fingerprint()
        by_id: dict[int, str] = {}
        self.aliases: dict[str, list[str]] = {}
        everything: list[nn.Parameter] = []
        for name, param in model.named_parameters(remove_duplicate=False):
            if id(param) in by_id:
                self.aliases.setdefault(by_id[id(param)], []).append(name)
            else:
                by_id[id(param)] = name
                everything.append(param)
        self.everything = everything
        self._trainable = [param.requires_grad for param in everything]
        self.params = [param for param in everything if param.requires_grad and id(param) not in elsewhere]
        self.names = [by_id[id(param)] for param in self.params]
        self._has_complex = any(param.is_complex() for param in self.params)
        self.frozen = [by_id[id(param)] for param in everything if not param.requires_grad]
        self.patterns = patterns
        groups = grouping.assign(model, self.names, patterns or {})
        self.group_names = list(dict.fromkeys(groups))
        index = {name: position for position, name in enumerate(self.group_names)}
        self.group_of = np.array([index[group] for group in groups], dtype=np.int64)
        self.ranks: Ranks | None = None
        """The ranks that share the parameters, where any of them is a DTensor or there is a group that does."""
        group = process_group if process_group is not None else group_of_modules(wrapped)
        if self.params and (group is not None or self.has_dtensors):
            self.ranks = Ranks(self.params, group, replicas=replicated_params(wrapped))
        self._layout: Layout | None = None
        self._present: Sequence[int] = ()

    @property
    def has_dtensors(self) -> bool:
        """Whether any parameter is a DTensor now: between its passes FSDP2 has whole ones in their place."""
        return any(map(is_distributed, self.params))

    def stale(self) -> bool:
        """Whether a parameter was added, removed, replaced, frozen or set free since the table was made."""
        if self._take_fingerprint() != self._fingerprint:
            return True
        return list(map(_requires_grad, self.everything)) != self._trainable

    def gradients(self, only: Container[int] | None = None) -> Gradients:
        """Collect the gradients that the parameters have now; with `only`, those of the parameters with these ids."""
        if self.ranks is not None:
            return SharedGradients(self.params, self.ranks, self._lay_out_cached, only)
        found = list(map(_grad, self.params))
        present = [index for index, grad in enumerate(found) if grad is not None]
        if only is not None:
            present = [index for index in present if id(self.params[index]) in only]
        layout = self._lay_out_cached(present)
        tensors = found if len(present) == len(found) else [found[index] for index in present]
        if not self._has_complex and set(map(_layout, tensors)) <= _DENSE:
            return Gradients(tensors, layout, {})
        return self._unusual(tensors, layout)

    def resize(self, grads: Gradients) -> None:
        """Take the sizes of parameters anew that were given data of another shape."""
        self._layout = None
        grads.layout = self._lay_out_cached(self._present)

    def passed(self, present: Sequence[int]) -> Gradients:
        """Return gradients of the parameters at these positions that are not there any more."""
        return Gradients([], self._lay_out_cached(present), {})

    def _lay_out_cached(self, present: Sequence[int]) -> Layout:
        if self._layout is None or present != self._present:
            self._layout, self._present = self._lay_out(present), present
        return self._layout

    def _lay_out(self, present: Sequence[int]) -> Layout:
        there = set(present)
        return Layout(
            [self.names[index] for index in present],
            [self.params[index] for index in present],
            [_count(self.params[index]) for index in present],
            self.group_of[list(present)],
            self.group_names,
            [name for index, name in enumerate(self.names) if index not in there],
        )

    def _unusual(self, tensors: Sequence[Tensor], layout: Layout) -> Gradients:
        touched: dict[str, int] = {}
        dense: list[Tensor] = []
        sparse: dict[int, Tensor] = {}
        for index, grad in enumerate(tensors):
            if grad.layout is not torch.strided:
                sparse[index] = _coalesced(grad)
                grad = sparse[index]._values()
                touched[layout.names[index]] = grad.shape[0]
            dense.append(torch.view_as_real(grad) if grad.is_complex() else grad)
        counts = [grad.numel() for grad in dense]
        if counts != layout.counts:
            layout = Layout(layout.names, layout.params, counts, layout.group_of, layout.group_names, layout.missing)
        return Gradients(dense, layout, touched, sparse)

    def _take_fingerprint(self) -> list[int]:
        modules = chain.from_iterable(map(_values, self._module_dicts))
        params = chain.from_iterable(map(_values, self._param_dicts))
        return list(map(id, chain(modules, params)))


def _count(param: Tensor) -> int:
    return param.numel() * (2 if param.is_complex() else 1)


def _coalesced(grad: Tensor) -> Tensor:
    """Return a sparse gradient with one value for each touched place."""
    if grad.layout is not torch.sparse_coo:
        raise UsageError(
            f"gradient layout {grad.layout}: expected strided or sparse_coo. Make the gradient dense first."
        )
    return grad.coalesce()
