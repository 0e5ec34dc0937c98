"""Parameter groups: assigns each parameter to one, and keeps the layout of gradients from step to step."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import nn

W_IN, W_REC, W_OUT, W_H_INIT, BIASES = "W_in", "W_rec", "W_out", "W_h_init", "biases"

_WORD = r"(?:^|[._])"
_END = r"(?=$|[._\d])"
_NAMES: Final = (
    (
        W_H_INIT,
        re.compile(rf"{_WORD}(?:w_)?(?:h_?init|init_?h|h_?0|h0|initial|init_state|init_encoder){_END}", re.I),
    ),
    (
        W_REC,
        re.compile(rf"{_WORD}(?:w_?rec|w_?hh|weight_hh|weight_hr|recurrent|rec|hh|h2h|hidden_to_hidden){_END}", re.I),
    ),
    (
        W_IN,
        re.compile(rf"{_WORD}(?:w_?in|w_?ih|w_?xh|weight_ih|input|in_proj|ih|i2h|input_to_hidden){_END}", re.I),
    ),
    (W_OUT, re.compile(rf"{_WORD}(?:w_?out|w_?ho|w_?hy|readout|output|out|h2o|decoder|head){_END}", re.I)),
)
_BIAS: Final = re.compile(r"(?:^|[._])(?:bias|b)(?:$|[._\d])|(?:^|\.)(?:b|bias)_\w+$", re.I)
_FEW, _ENOUGH, _MANY = 8, 32, 128


def assign_groups(model: nn.Module, names: Sequence[str], patterns: Mapping[str, str]) -> list[str]:
    """Return the group of each named parameter; the first regex that is found in a name wins."""
    found = [next((group for group, one in patterns.items() if re.search(one, name)), None) for name in names]
    if all(found):
        return [group or "" for group in found]
    rest = _by_matrix(model, names) if is_recurrent(model) else _by_module(names)
    return [group or other for group, other in zip(found, rest, strict=True)]


def is_recurrent(model: nn.Module) -> bool:
    """Whether a module is a recurrent layer or cell, or has a parameter that is named like a recurrent matrix."""
    if any(isinstance(module, (nn.RNNBase, nn.RNNCellBase)) for module in model.modules()):
        return True
    recurrent = dict(_NAMES)[W_REC]
    return any(recurrent.search(name) for name, _ in model.named_parameters())


def _by_matrix(model: nn.Module, names: Sequence[str]) -> list[str]:
    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.RNNBase, nn.RNNCellBase))]
    groups: list[str | None] = [_matrix(name, layers) for name in names]
    recurrent = [index for index, group in enumerate(groups) if group in (W_REC, W_IN)]
    first, last = (recurrent[0], recurrent[-1]) if recurrent else (0, -1)
    rest = _by_module(names)
    shapes = dict(model.named_parameters(remove_duplicate=False))
    for index, name in enumerate(names):
        if groups[index] is None and shapes[name].ndim == 2:
            groups[index] = W_IN if index < first else W_OUT if index > last else None
    return [group or rest[index] for index, group in enumerate(groups)]


def _matrix(name: str, layers: Sequence[str]) -> str | None:
    """Return the group of a recurrent network's parameter, by the type of its module or else by its name."""
    owner, _, own = name.rpartition(".")
    if _BIAS.search(own) and not own.startswith("weight"):
        return BIASES
    if owner in layers:
        return W_IN if own.startswith("weight_ih") else W_REC
    return next((group for group, pattern in _NAMES if pattern.search(name)), None)


def _by_module(names: Sequence[str]) -> list[str]:
    """Group by module paths, cut at the depth that gives at most as many groups as a person can read."""
    paths = [name.split(".")[:-1] or [name] for name in names]
    deepest = max((len(path) for path in paths), default=0)
    depth, chosen = 1, _cut(paths, 1)
    while depth < deepest:
        depth += 1
        finer = _cut(paths, depth)
        few = len(set(chosen)) < _FEW
        if len(set(finer)) > (_MANY if few else _ENOUGH):
            break
        chosen = finer
    return chosen if len(set(chosen)) <= _MANY else ["all"] * len(names)


def _cut(paths: Sequence[Sequence[str]], depth: int) -> list[str]:
    return [".".join(path[:depth]) for path in paths]


class Layout:
    """The layout of gradients: names, groups and sizes, which stay the same from step to step."""

    def __init__(
        self,
        names: list[str],
        params: list[nn.Parameter],
        counts: Sequence[int],
        group_of: NDArray[np.int64],
        group_names: list[str],
        missing: list[str],
    ) -> None:
        self.names, self.missing = names, missing
        self.param_refs = [weakref.ref(param) for param in params]
        self.group_of, self.group_names = group_of, group_names
        self.recount(counts)

    @property
    def params(self) -> list[nn.Parameter]:
        """Return the parameters that still exist; weak references, so that a kept report keeps no model alive."""
        return [param for ref in self.param_refs if (param := ref()) is not None]

    def recount(self, counts: Sequence[int]) -> None:
        """Update the sizes, which for sparse gradients change on every step."""
        self.counts = list(counts)
        self.sizes = np.array(self.counts, dtype=np.int64)
        self.plan: Any = None
        """The measurer's plan for gradients of these sizes, which it uses again on the next step."""
        sums = np.bincount(self.group_of, weights=self.counts, minlength=len(self.group_names))
        self.group_counts = [int(count) for count in sums]
        self.total_count = sum(self.counts)
