"""The parameters of a model, resolved once and re-checked cheaply on every step."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradtrack.errors import UsageError
from gradtrack.measure import grouping
from gradtrack.measure.measurer import Batch

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
        sums = np.bincount(self.group_of, weights=self.counts, minlength=len(self.group_names))
        self.group_counts = [int(count) for count in sums]
        self.total_count = sum(self.counts)


class Gradients:
    """The gradients of one step: the tensors to measure and their layout.

    A sparse gradient is measured by its coalesced values, a complex one by its real and imaginary parts.
    """

    __slots__ = ("batch", "layout", "tensors", "touched_rows")

    def __init__(self, tensors: list[Tensor], layout: Layout, touched_rows: dict[str, int]) -> None:
        self.tensors, self.layout, self.touched_rows = tensors, layout, touched_rows
        self.batch: Batch | Sequence[Tensor] = tensors
        """The tensors as the measurer has prepared them, or as they are."""


class ParameterTable:
    """The trainable parameters of a model by name and group, each once, with the other names of tied ones."""

    def __init__(self, model: nn.Module, patterns: Mapping[str, str] | None = None) -> None:
        self._modules = list(model.modules())
        self._module_dicts = [module._modules for module in self._modules]
        self._param_dicts = [module._parameters for module in self._modules]
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
        self._everything = everything
        self._trainable = [param.requires_grad for param in everything]
        self.params = [param for param in everything if param.requires_grad]
        self.names = [by_id[id(param)] for param in self.params]
        self._has_complex = any(param.is_complex() for param in self.params)
        self.frozen = [by_id[id(param)] for param in everything if not param.requires_grad]
        self.patterns = patterns
        groups = grouping.assign(model, self.names, patterns or {})
        self.group_names = list(dict.fromkeys(groups))
        index = {name: position for position, name in enumerate(self.group_names)}
        self.group_of = np.array([index[group] for group in groups], dtype=np.int64)
        self._layout: Layout | None = None
        self._present: Sequence[int] = ()

    def stale(self) -> bool:
        """Whether a parameter was added, removed, replaced, frozen or set free since the table was made."""
        if self._take_fingerprint() != self._fingerprint:
            return True
        return list(map(_requires_grad, self._everything)) != self._trainable

    def gradients(self, only: Container[int] | None = None) -> Gradients:
        """Collect the gradients that the parameters have now; with `only`, those of the parameters with these ids."""
        found = list(map(_grad, self.params))
        present = [index for index, grad in enumerate(found) if grad is not None]
        if only is not None:
            present = [index for index in present if id(self.params[index]) in only]
        if self._layout is None or present != self._present:
            self._layout, self._present = self._lay_out(present), present
        layout = self._layout
        tensors = found if len(present) == len(found) else [found[index] for index in present]
        if not self._has_complex and set(map(_layout, tensors)) <= _DENSE:
            return Gradients(tensors, layout, {})
        return self._unusual(tensors, layout)

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
        for index, grad in enumerate(tensors):
            if grad.layout is not torch.strided:
                grad = _coalesced(grad, layout.params[index])
                touched[layout.names[index]] = grad.shape[0]
            dense.append(torch.view_as_real(grad) if grad.is_complex() else grad)
        counts = [grad.numel() for grad in dense]
        if counts != layout.counts:
            layout = Layout(layout.names, layout.params, counts, layout.group_of, layout.group_names, layout.missing)
        return Gradients(dense, layout, touched)

    def _take_fingerprint(self) -> list[int]:
        modules = chain.from_iterable(map(_values, self._module_dicts))
        params = chain.from_iterable(map(_values, self._param_dicts))
        return list(map(id, chain(modules, params)))


def _count(param: Tensor) -> int:
    return param.numel() * (2 if param.is_complex() else 1)


def _coalesced(grad: Tensor, param: nn.Parameter) -> Tensor:
    """Return the values of a sparse gradient, one for each touched place; changing them changes the gradient."""
    if grad.layout is not torch.sparse_coo:
        raise UsageError(
            f"gradient layout {grad.layout}: expected strided or sparse_coo. Make the gradient dense first."
        )
    if not grad.is_coalesced():
        grad = grad.coalesce()
        param.grad = grad
    return grad._values()
