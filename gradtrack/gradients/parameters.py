"""The parameter table of a model: its trainable parameters by name and group, and their gradients."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, is_not
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from gradtrack.errors import UsageError
from gradtrack.gradients.collected import Gradients, SharedGradients
from gradtrack.gradients.distributed.merge import Ranks
from gradtrack.gradients.distributed.shards import group_of_modules, is_distributed, replicated_params, unwrapped
from gradtrack.gradients.groups import Layout, assign_groups

_grad = attrgetter("grad")
_requires_grad = attrgetter("requires_grad")
_layout = attrgetter("layout")
_values = dict.values
_DENSE: Final = frozenset({torch.strided})
Value = TypeVar("Value")
_LAST: Final = (object(),)
"""Sentinel that ends the comparison in `stale()`, so that added modules are noticed."""


class OutsideParameter(NamedTuple):
    """A parameter that an optimizer of the model owns and no module has, as a temperature, a prompt, a loss weight."""

    name: str
    group: str
    param: nn.Parameter


class NamedParameter(NamedTuple):
    """The names of a parameter, its group in reports, and the name of its optimizer's group, each if it has one."""

    names: tuple[str, ...]
    group: str
    label: str


class ParameterTable:
    """The trainable parameters of a model by name and group, each once, with the other names of tied ones.

    Parameters `outside` of the model come last, unless ranks share the parameters.

    With a process group the gradients are spread over its ranks, also if they are plain tensors. The parameters with
    the ids in `elsewhere` belong to another table.
    """

    def __init__(
        self,
        model: nn.Module,
        patterns: Mapping[str, str] | None = None,
        process_group: Any = None,
        *,
        elsewhere: Container[int] = (),
        outside: Sequence[OutsideParameter] = (),
    ) -> None:
        wrapped, model = list(model.modules()), unwrapped(model)
        self._modules = list(model.modules())
        # A ScriptModule makes new wrappers of its parts on every call, and its parts cannot change.
        plain = [module for module in self._modules if not isinstance(module, torch.jit.ScriptModule)]
        self._dicts: list[dict[str, Any]] = [module._modules for module in plain]
        self._dicts += [module._parameters for module in plain]
        self._parts = [*chain.from_iterable(map(_values, self._dicts)), *_LAST]
        by_id: dict[int, str] = {}
        self.aliases: dict[str, list[str]] = {}
        everything: list[nn.Parameter] = []
        for name, param in model.named_parameters(remove_duplicate=False):
            if id(param) in by_id:
                self.aliases.setdefault(by_id[id(param)], []).append(name)
            else:
                by_id[id(param)] = name
                everything.append(param)
        group = process_group if process_group is not None else group_of_modules(wrapped)
        shared = group is not None or any(map(is_distributed, everything))
        beside = {} if shared else {id(one.param): one for one in outside if id(one.param) not in by_id}
        by_id |= {key: one.name for key, one in beside.items()}
        everything += [one.param for one in beside.values()]
        self.outside = frozenset(one.name for one in beside.values())
        """The names of parameters that are in no module."""
        self.everything = everything
        self._trainable = [param.requires_grad for param in everything]
        self.params = [param for param in everything if param.requires_grad and id(param) not in elsewhere]
        self.names = [by_id[id(param)] for param in self.params]
        self._has_complex = any(param.is_complex() for param in self.params)
        self.frozen = [by_id[id(param)] for param in everything if not param.requires_grad]
        self.patterns = patterns
        within = [name for name in self.names if name not in self.outside]
        groups = assign_groups(model, within, patterns or {})
        groups += [beside[id(param)].group for param in self.params[len(within) :]]
        self.group_names = list(dict.fromkeys(groups))
        index = {name: position for position, name in enumerate(self.group_names)}
        self.group_of = np.array([index[group] for group in groups], dtype=np.int64)
        self.ranks: Ranks | None = None
        """The ranks that share the parameters, if any is a DTensor or there is a process group."""
        if self.params and (group is not None or self.has_dtensors):
            self.ranks = Ranks(self.params, group, replicas=replicated_params(wrapped))
        self.plan_of_weights: Any = None
        """The measurer's plan for the weights, which it uses again for the next row."""
        self._laid_out: tuple[Sequence[int], Layout | None] = ((), None)
        """The last layout and the positions that it is of: in one piece, since another thread may read a report."""
        self._everything = list(range(len(self.params)))

    def within(self, by_name: dict[str, Value]) -> dict[str, Value]:
        """Leave out parameters that are in no module, since analyzers look at modules only."""
        return {name: value for name, value in by_name.items() if name not in self.outside} if self.outside else by_name

    def named(self, labels: Mapping[int, str]) -> tuple[list[NamedParameter], list[NamedParameter]]:
        """Return what the trainable parameters are called, and the frozen ones; `labels` are by the ids of all."""

        def called(name: str, group: str, param: Tensor) -> NamedParameter:
            return NamedParameter((name, *self.aliases.get(name, ())), group, labels.get(id(param), ""))

        groups = [self.group_names[group] for group in self.group_of.tolist()]
        kept = [param for param, trains in zip(self.everything, self._trainable, strict=True) if not trains]
        frozen = [called(name, "", param) for name, param in zip(self.frozen, kept, strict=True)]
        return list(map(called, self.names, groups, self.params)), frozen

    @property
    def has_dtensors(self) -> bool:
        """Whether any parameter is a DTensor now: between its passes FSDP2 has whole ones in their place."""
        return any(map(is_distributed, self.params))

    def stale(self) -> bool:
        """Whether a parameter was added, removed, replaced, frozen or set free since the table was made."""
        if not all(map(is_, chain(chain.from_iterable(map(_values, self._dicts)), _LAST), self._parts)):
            return True
        return list(map(_requires_grad, self.everything)) != self._trainable

    def gradients(self, only: Container[int] | None = None) -> Gradients:
        """Collect the gradients that the parameters have now; with `only`, those of the parameters with these ids."""
        if self.ranks is not None:
            return SharedGradients(self.params, self.ranks, self.lay_out, only)
        found = list(map(_grad, self.params))
        present: Sequence[int] = self._everything
        if only is not None or not all(map(is_not, found, repeat(None))):
            present = [index for index, grad in enumerate(found) if grad is not None]
            if only is not None:
                present = [index for index in present if id(self.params[index]) in only]
        known, layout = self._laid_out
        if layout is None or present is not known:
            layout = self.lay_out(present)
        tensors = found if len(present) == len(found) else [found[index] for index in present]
        if not self._has_complex and _DENSE.issuperset(map(_layout, tensors)):
            return Gradients(tensors, layout, {})
        return self._with_sparse_or_complex(tensors, layout)

    def resize(self, grads: Gradients) -> None:
        """Update the layout with the sizes of parameters that were given data of another shape."""
        present, _ = self._laid_out
        self._laid_out = present, None
        grads.layout = self.lay_out(present)

    def lay_out(self, present: Sequence[int]) -> Layout:
        """Return the layout of the gradients of the parameters at these positions."""
        known, layout = self._laid_out
        if layout is None or present != known:
            layout = self._lay_out_anew(present)
            self._laid_out = present, layout
        return layout

    def _lay_out_anew(self, present: Sequence[int]) -> Layout:
        there = set(present)
        return Layout(
            [self.names[index] for index in present],
            [self.params[index] for index in present],
            [_count(self.params[index]) for index in present],
            self.group_of[list(present)],
            self.group_names,
            [name for index, name in enumerate(self.names) if index not in there],
        )

    def _with_sparse_or_complex(self, tensors: Sequence[Tensor], layout: Layout) -> Gradients:
        """Return gradients of which some are sparse, complex or conjugate, as tensors of real numbers."""
        touched: dict[str, int] = {}
        dense: list[Tensor] = []
        stand_ins: dict[int, Tensor] = {}
        for index, grad in enumerate(tensors):
            if grad.layout is not torch.strided:
                stand_ins[index] = _coalesced(grad)
                grad = stand_ins[index]._values()
                touched[layout.names[index]] = grad.shape[0]
            elif grad.is_conj():  # autograd leaves one where a model takes the conjugate of a parameter
                grad = stand_ins[index] = grad.resolve_conj()
            dense.append(torch.view_as_real(grad) if grad.is_complex() else grad)
        counts = [grad.numel() for grad in dense]
        if counts != layout.counts:
            layout = Layout(layout.names, layout.params, counts, layout.group_of, layout.group_names, layout.missing)
        return Gradients(dense, layout, touched, stand_ins)


def _count(param: Tensor) -> int:
    return param.numel() * (2 if param.is_complex() else 1)


def _coalesced(grad: Tensor) -> Tensor:
    """Return a sparse gradient with one value for each touched place."""
    if grad.layout is not torch.sparse_coo:
        raise UsageError(
            f"gradient layout {grad.layout}: expected strided or sparse_coo. Make the gradient dense first."
        )
    return grad.coalesce()
